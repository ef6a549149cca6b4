"""The Ollama API: `/` and `/api/*`."""
