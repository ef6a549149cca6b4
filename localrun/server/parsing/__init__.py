"""From the text that a model writes to content, thinking and tool calls."""
