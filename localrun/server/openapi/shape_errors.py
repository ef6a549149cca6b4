"""Which struct describes a path's errors.

Pure. Does not: write errors (`http/failures.py` does).
"""

from __future__ import annotations

from typing import Any

from localrun.server.http.failures import Shape, shape_of
from localrun.server.openapi.anthropic_answers import AnthropicError
from localrun.server.openapi.ollama_answers import OllamaError
from localrun.server.openapi.openai_answers import OpenAIError
from localrun.server.openapi.other_answers import NativeError

_TYPES: dict[Shape, Any] = {
    Shape.OLLAMA: OllamaError,
    Shape.OPENAI: OpenAIError,
    Shape.ANTHROPIC: AnthropicError,
    Shape.NATIVE: NativeError,
}


def error_type(path: str) -> Any:
    """The struct of the errors of the family that `path` belongs to."""
    return _TYPES[shape_of(path)]
