"""Sampling on the host and on a device."""
