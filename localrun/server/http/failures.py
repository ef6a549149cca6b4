"""Errors as HTTP answers: one error, five shapes.

Each API family has its own error JSON, and a client reads only its own:

- `/api/*` as Ollama: `{"error": "message"}`
- `/v1/*`, and LM Studio's `/api/v0/*`, as OpenAI: `{"error": {"message", "type", "param", "code"}}`
- `/v1/messages*` as Anthropic: `{"type": "error", "error": {"type", "message"}, "request_id"}`
- llama-server's own routes as there: `{"error": {"code", "message", "type"}}` with the status as `code`, and `field`
- everything else: `{"error": {"code", "message", "field"}}`

Status and code come from the exception alone (`errors.py`). Every error answer carries `X-Localrun-Error: <code>`, so
that a client can tell cases apart also where the shape has no code.

Does not: send anything.
"""

from __future__ import annotations

import json
import logging
import math
from enum import StrEnum

from localrun.errors import ContextExceeded, LocalrunError, QueueFull, RateLimited, Unauthorized, Unavailable, of_disk

_log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]


class Shape(StrEnum):
    """The API family whose error and stream format a route speaks."""

    OLLAMA = "ollama"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    LLAMA_SERVER = "llama-server"
    NATIVE = "native"


_LLAMA_SERVER = frozenset(
    ("/completion", "/completions", "/infill", "/tokenize", "/detokenize", "/tokenizer_info", "/apply-template",
     "/props", "/slots", "/lora-adapters", "/models", "/models/load", "/models/unload")
)  # fmt: skip


def shape_of(path: str) -> Shape:
    """The family that a path belongs to, also when no route answers there."""
    if path.startswith("/api/v0/"):
        return Shape.OPENAI
    if path.startswith("/api/"):
        return Shape.OLLAMA
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return Shape.ANTHROPIC
    if path == "/v1" or path.startswith("/v1/"):
        return Shape.OPENAI
    if path in _LLAMA_SERVER or path.startswith("/slots/"):
        return Shape.LLAMA_SERVER
    return Shape.NATIVE


def unforeseen(error: Exception, what: str) -> LocalrunError:
    """What to tell of a disk that refused, or of a bug while `what` was done; the log has the details."""
    refused = of_disk(error) if isinstance(error, OSError) else None
    if refused is not None:
        _log.warning("%s: %s", what, refused.message)
        return refused
    _log.error("%s failed", what, exc_info=error)
    return LocalrunError("internal error; the daemon's log has the details")


def body(error: LocalrunError, shape: Shape, request_id: str | None = None) -> bytes:
    """The error's JSON body, in the family's shape."""
    content: object
    # Agents shorten a conversation by these, without looking for them in the message.
    sizes = {}
    if isinstance(error, ContextExceeded) and error.n_ctx:
        sizes = {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
    if shape is Shape.OLLAMA:
        content = error.message
    elif shape is Shape.OPENAI:
        content = {
            "message": error.message,
            "type": _openai_type(error),
            "param": error.field,
            "code": error.code,
        } | sizes
    elif shape is Shape.ANTHROPIC:
        content = {"type": _type(_ANTHROPIC_TYPES, error, "api_error"), "message": error.message}
        whole = {"type": "error", "error": content, "request_id": request_id}
        return json.dumps(whole).encode("ascii")
    elif shape is Shape.LLAMA_SERVER:
        content = {
            "code": error.status,
            "message": error.message,
            "type": _llama_type(error),
            "field": error.field,
        } | sizes
    else:
        content = {"code": error.code, "message": error.message, "field": error.field}
    # Messages may quote what the client sent; ASCII output is valid whatever that was, a lone surrogate included.
    return json.dumps({"error": content}).encode("ascii")


def headers(error: LocalrunError) -> Headers:
    """The headers of an error answer, without its length."""
    result = [(b"content-type", b"application/json"), (b"x-localrun-error", error.code.encode("ascii"))]
    if isinstance(error, QueueFull | Unavailable) and error.retry_after_s is not None:
        result.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode("ascii")))
    if isinstance(error, Unauthorized):
        result.append((b"www-authenticate", b'Bearer realm="localrun"'))
    return result


def stream_event(error: LocalrunError, shape: Shape, request_id: str | None = None) -> bytes:
    """The error as the last event of a stream whose status line is already sent: an NDJSON line, or an SSE event.

    Ollama's line carries the code beside the message, because no header can any more.
    """
    if shape is Shape.OLLAMA:
        return json.dumps({"error": error.message, "code": error.code}).encode("ascii") + b"\n"
    name = b"event: error\n" if shape is Shape.ANTHROPIC else b""
    return name + b"data: " + body(error, shape, request_id) + b"\n\n"


def _openai_type(error: LocalrunError) -> str:
    if isinstance(error, RateLimited):  # as OpenAI has it, whose clients look at the code
        return "requests" if error.kind == "requests" else "tokens"
    return _type(_OPENAI_TYPES, error, "api_error")


def _type(names: dict[int, str], error: LocalrunError, otherwise: str) -> str:
    return names.get(error.status, "invalid_request_error" if error.status < 500 else otherwise)


_OPENAI_TYPES = {404: "not_found_error", 429: "rate_limit_error"}
_LLAMA_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


def _llama_type(error: LocalrunError) -> str:
    is_too_long = isinstance(error, ContextExceeded)
    return "exceed_context_size_error" if is_too_long else _type(_LLAMA_TYPES, error, "server_error")


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
}
