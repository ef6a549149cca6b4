"""Vectors and scores over HTTP: OpenAI's, Ollama's and the rerankers' routes."""
