"""The OpenAI API: `/v1/*`."""
