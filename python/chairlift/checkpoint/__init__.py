"""From a model's name to a directory with its weights, configuration and tokenizer; nothing here imports torch."""
