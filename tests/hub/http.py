"""As much of an HTTP/1.1 server as a test needs that wants to break off in the middle of a body."""

from __future__ import annotations

import asyncio
import http
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

CHUNK_BYTES = 64 * 1024


@dataclass
class Answer:
    """`body` yields content; `length` None leaves Content-Length out and closes the connection at the end.

    A body that ends before `length` breaks the connection off.
    """

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes = b""
    body: AsyncIterator[bytes] | None = None
    length: int | None = None


Handler = Callable[[str, str, dict[str, str]], Awaitable[Answer]]


async def serve(handle: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers the requests of one connection, one after the other."""
    try:
        while await _serve_one(handle, reader, writer):
            pass
    except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
        pass
    finally:
        writer.close()


async def _serve_one(handle: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    if length := int(headers.get("content-length", "0")):
        await reader.readexactly(length)
    answer = await handle(method, target, headers)
    is_streamed = answer.body is not None
    length_bytes = answer.length if is_streamed else len(answer.content)
    sent = dict(answer.headers)
    if length_bytes is not None:
        sent.setdefault("Content-Length", str(length_bytes))
    is_last = length_bytes is None
    if is_last:
        sent["Connection"] = "close"
    reason = http.HTTPStatus(answer.status).phrase if answer.status in http.HTTPStatus._value2member_map_ else "?"
    lines = [f"HTTP/1.1 {answer.status} {reason}", *(f"{name}: {value}" for name, value in sent.items())]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    if method == "HEAD":
        await writer.drain()
        return True
    n_sent_bytes = 0
    if answer.body is None:
        writer.write(answer.content)
    else:
        async for chunk in answer.body:
            writer.write(chunk)
            n_sent_bytes += len(chunk)
            await writer.drain()
        if length_bytes is not None and n_sent_bytes != length_bytes:
            # Closed, not reset: what was written gets through, so that the bytes can be counted.
            return False
    await writer.drain()
    return not is_last
