"""What fits into memory: weights, KV cache and steps."""
