"""A streaming HTTP client that costs next to nothing: asyncio's protocol and the C parser of httptools.

A load generator shares the machine with what it measures. A full client took 90 to 270 microseconds of a core per token
here, as much as the daemon itself; this one is for measuring only.

Does not: follow redirects, speak TLS, reuse connections, or retry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import httptools
import msgspec

from localrun.errors import BadRequest, DaemonUnreachable, LocalrunError


class Refused(LocalrunError):
    """The server answered with an HTTP error. `retry_after_s` is its Retry-After in seconds, where it gave one."""

    def __init__(self, http_status: int, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.retry_after_s = retry_after_s


async def post_stream(
    url: str, body: bytes, on_data: Callable[[bytes, float], None], headers: Mapping[str, str] | None = None
) -> None:
    """POST a JSON `body`; `on_data` gets each piece of the answer and the time (`perf_counter`) at which it came.

    Raises DaemonUnreachable when nobody listens, Refused for an HTTP error, LocalrunError for a connection that breaks,
    and BadRequest for a URL that is not plain HTTP.
    """
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise BadRequest(f"the load generator speaks plain HTTP, not {parts.scheme or 'this'}: {url}; use http://")
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    loop = asyncio.get_running_loop()
    exchange = _Exchange(loop.create_future(), on_data)
    try:
        transport, _ = await loop.create_connection(lambda: exchange, host, port)
    except OSError as error:
        raise DaemonUnreachable(f"nothing answers at {host}:{port}: {error}") from error
    fields = {
        "Host": parts.netloc.rpartition("@")[2],
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    transport.write(f"POST {parts.path} HTTP/1.1\r\n{head}\r\n".encode() + body)
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
        self._retry_after_s: float | None = None
        self._has_length = False
        self._ends_by_closing = False
        self._problem = b""

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except Exception as error:
            self._end(LocalrunError(f"the server sent something that is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._ends_by_closing:
            self.on_message_complete()
        self._end(LocalrunError(f"the connection broke before the answer was complete: {exc or 'closed'}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._has_length = self._has_length or name in (b"content-length", b"transfer-encoding")
        # It may also be a date; how long that is would depend on two clocks.
        if name == b"retry-after" and value.strip().isdigit():
            self._retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        self._ends_by_closing = not self._has_length

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() == 200:
            self._on_data(body, time.perf_counter())
        else:
            self._problem += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._end(None if status == 200 else Refused(status, _reason(status, self._problem), self._retry_after_s))

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def _reason(status: int, body: bytes) -> str:
    """The message within the error JSON of OpenAI's API, or the body as it is."""
    try:
        said = msgspec.json.decode(body, type=dict[str, object]).get("error")
    except msgspec.DecodeError:
        said = None
    message = said.get("message") if isinstance(said, dict) else said
    return f"status {status}: {message or body.decode(errors='replace')}"
