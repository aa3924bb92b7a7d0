"""Compares a model's tokens, logits and embeddings with those of transformers or llama.cpp: `chairlift verify`."""
