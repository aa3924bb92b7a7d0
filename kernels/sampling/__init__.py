"""Sampling on the GPU: one operation a file, and in `reference` the same operations in torch."""
