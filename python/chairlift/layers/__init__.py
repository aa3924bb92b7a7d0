"""Layers of a transformer, over a ragged token axis and a paged cache."""
