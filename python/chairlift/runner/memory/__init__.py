"""Memory planning for weights, KV cache and steps."""
