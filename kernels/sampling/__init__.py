"""Sampling on the GPU. Each file has one operation; `reference` has the same operations in torch."""
