"""Errors as HTTP answers: one error, three shapes.

Each API family has its own error JSON, and a client reads only its own:

- `/api/*` as Ollama: `{"error": "message"}`
- `/v1/*` as OpenAI: `{"error": {"message", "type", "param", "code"}}`
- everything else: `{"error": {"code", "message", "field"}}`

Status and code come from the exception alone (`errors.py`). Every error answer carries `X-Localrun-Error: <code>`, so
that a client can tell cases apart also where the shape has no code.

Does not: send anything, or decide what is an error.
"""

from __future__ import annotations

import json
import math
from enum import StrEnum

from localrun.errors import LocalrunError, QueueFull

Headers = list[tuple[bytes, bytes]]


class Shape(StrEnum):
    """The API family whose error and stream format a route speaks."""

    OLLAMA = "ollama"
    OPENAI = "openai"
    NATIVE = "native"


def shape_of(path: str) -> Shape:
    """The family that a path belongs to, also when no route answers there."""
    if path.startswith("/api/"):
        return Shape.OLLAMA
    if path == "/v1" or path.startswith("/v1/"):
        return Shape.OPENAI
    return Shape.NATIVE


def body(error: LocalrunError, shape: Shape) -> bytes:
    """The error's JSON body, in the family's shape."""
    content: object
    if shape is Shape.OLLAMA:
        content = error.message
    elif shape is Shape.OPENAI:
        content = {"message": error.message, "type": _openai_type(error), "param": error.field, "code": error.code}
    else:
        content = {"code": error.code, "message": error.message, "field": error.field}
    # Messages may quote what the client sent; ASCII output is valid whatever that was, a lone surrogate included.
    return json.dumps({"error": content}).encode("ascii")


def headers(error: LocalrunError) -> Headers:
    """The headers of an error answer, without its length."""
    result = [(b"content-type", b"application/json"), (b"x-localrun-error", error.code.encode("ascii"))]
    if isinstance(error, QueueFull):
        result.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode("ascii")))
    return result


def stream_event(error: LocalrunError, shape: Shape) -> bytes:
    """The error as the last event of a stream whose status line is already sent: an NDJSON line, or an SSE event.

    Ollama's line carries the code beside the message, because no header can any more.
    """
    if shape is Shape.OLLAMA:
        return json.dumps({"error": error.message, "code": error.code}).encode("ascii") + b"\n"
    return b"data: " + body(error, shape) + b"\n\n"


def _openai_type(error: LocalrunError) -> str:
    if error.status == 404:
        return "not_found_error"
    if error.status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if error.status < 500 else "api_error"
