"""llama-server's own API; `/infill` and `/lora-adapters`, which it shares with OpenAI's bodies, are in `openai/`."""
