"""From a conversation to a prompt, and from the model's text to content, thinking and tool calls."""
