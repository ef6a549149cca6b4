"""A loopback Ollama registry: `with Registry() as registry: name = registry.add("library/fox", model=...)`."""

from __future__ import annotations

from .server import Layer, Registry

__all__ = ["Layer", "Registry"]
