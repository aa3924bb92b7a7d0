"""Runs the model: arrays of one step in, sampled tokens out."""
