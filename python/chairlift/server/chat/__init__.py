"""Chat completions: conversation in, message and tool calls out."""
