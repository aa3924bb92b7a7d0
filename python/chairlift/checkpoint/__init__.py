"""Finds a model by name and returns a directory with its weights, configuration and tokenizer. Does not import torch."""
