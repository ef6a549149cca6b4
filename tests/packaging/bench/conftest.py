"""The model that the engine's tests share."""

from tests.engine.conftest import backend, opened, tiny_gguf

__all__ = ["backend", "opened", "tiny_gguf"]
