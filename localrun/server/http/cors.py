"""CORS headers for an origin that `limits.py` has let in.

Does not: decide which origins those are.
"""

from __future__ import annotations

import re

from starlette.types import Message, Send

_ALLOWED_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
# The headers that browser clients send beside the simple ones; the x-stainless-* ones come from the OpenAI SDK. The
# names asked for in a preflight are granted too when they are plain tokens: headers grant nothing here by themselves.
_ALLOWED_HEADERS = (
    "authorization, content-type, accept, user-agent, x-requested-with, openai-beta, "
    "x-localrun-client, x-localrun-lane, x-localrun-latency, x-localrun-deadline, "
    "x-stainless-arch, x-stainless-async, x-stainless-custom-poll-interval, "
    "x-stainless-helper-method, x-stainless-lang, x-stainless-os, x-stainless-package-version, "
    "x-stainless-poll-helper, x-stainless-retry-count, x-stainless-runtime, x-stainless-runtime-version, "
    "x-stainless-timeout"
)
_HEADER_NAMES = re.compile(r"[A-Za-z0-9\-_, ]{1,2048}", re.ASCII)
_EXPOSED_HEADERS = (
    b"x-localrun-request, x-localrun-error, x-localrun-truncated, x-localrun-ignored, request-id, retry-after"
)
_PREFLIGHT_AGE_S = b"600"


def granting(send: Send, origin: str) -> Send:
    """`send`, with the grant added to the answer's headers."""

    async def sendgranting(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *_cors_headers(origin)]}
        await send(message)

    return sendgranting


def _cors_headers(origin: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", _EXPOSED_HEADERS),
        (b"vary", b"origin"),
    ]


async def grant_preflight(send: Send, origin: str, asked: str) -> None:
    """Answers a preflight. `asked` is its Access-Control-Request-Headers."""
    allowed = f"{_ALLOWED_HEADERS}, {asked}" if _HEADER_NAMES.fullmatch(asked) else _ALLOWED_HEADERS
    answer = [
        *_cors_headers(origin),
        (b"access-control-allow-methods", _ALLOWED_METHODS),
        (b"access-control-allow-headers", allowed.encode("ascii")),
        (b"access-control-max-age", _PREFLIGHT_AGE_S),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": answer})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
