"""The model file that the tests of `models/` share."""

from tests.models.conftest import tiny_gguf

__all__ = ["tiny_gguf"]
