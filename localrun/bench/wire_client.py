"""A streaming HTTP client that costs next to nothing: asyncio's protocol and the C parser of httptools.

A load generator shares the machine with what it measures. A full client took 90 to 270 microseconds of a core per token
here, as much as the daemon itself; this one is for measuring only.

Does not: follow redirects, speak TLS, reuse connections, or retry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httptools

from localrun.errors import DaemonUnreachable, LocalrunError


async def post_stream(url: str, body: bytes, on_data: Callable[[bytes, float], None]) -> None:
    """POST a JSON `body`; `on_data` gets each piece of the answer and the time (`perf_counter`) at which it came.

    Raises DaemonUnreachable when nobody listens and LocalrunError for an HTTP error or a connection that breaks.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    loop = asyncio.get_running_loop()
    exchange = _Exchange(loop.create_future(), on_data)
    try:
        transport, _ = await loop.create_connection(lambda: exchange, host, port)
    except OSError as error:
        raise DaemonUnreachable(f"nothing answers at {host}:{port}: {error}") from error
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    try:
        await exchange.ended
    finally:
        transport.close()


class _Exchange(asyncio.Protocol):
    """One request and its answer; the names of the `on_` methods are those that httptools calls."""

    def __init__(self, ended: asyncio.Future[None], on_data: Callable[[bytes, float], None]) -> None:
        self.ended = ended
        self._on_data = on_data
        self._parser = httptools.HttpResponseParser(self)
        self._problem = b""

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except Exception as error:
            self._end(LocalrunError(f"the server sent something that is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(LocalrunError(f"the connection broke before the answer was complete: {exc or 'closed'}"))

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() == 200:
            self._on_data(body, time.perf_counter())
        else:
            self._problem += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._end(
            None if status == 200 else LocalrunError(f"status {status}: {self._problem.decode(errors='replace')}")
        )

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
