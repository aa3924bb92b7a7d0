"""Chat: conversations in, messages and tool calls out."""
