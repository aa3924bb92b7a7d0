"""Answers of a given form: JSON by a schema, a regular expression, a choice or a grammar, kept to by masks over the vocabulary."""
