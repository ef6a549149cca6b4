"""From a conversation to the prompt that a model's own template makes of it."""
