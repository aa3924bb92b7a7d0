"""Structured output: JSON schemas, regular expressions, choices and grammars, enforced by masks over the vocabulary."""
