"""Conversations with a model: messages and tools for chat templates, and reasoning, text and tool calls in its answers."""
