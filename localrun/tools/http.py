"""The HTTP client for servers that are reached by a url: with their headers, and limits on what they send.

Does not: follow redirects (the MCP library follows those within the origin).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import httpx2

from localrun.tools.config import ServerSettings, expanded

# As the guard's for programs. Events of a stream have this limit, too, by the MCP library.
MAX_MESSAGE_BYTES = 32_000_000


def http_client(settings: ServerSettings) -> httpx2.AsyncClient:
    """Raises BadRequest for a variable that is not set."""
    headers = {name: expanded(value, os.environ) for name, value in settings.headers.items()}
    return httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity", **headers},  # so that the bytes that come are all there is
        # A call's own time limit counts, and a stream of notifications may be silent for hours.
        timeout=httpx2.Timeout(settings.timeout_s, read=None),
        event_hooks={"response": [_bound]},
    )


async def _bound(response: httpx2.Response) -> None:
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise httpx2.StreamError("it sends compressed answers although it was asked not to")
    if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _LimitedStream(response.stream)


class _LimitedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size_bytes = 0
        async for data in self._stream:
            size_bytes += len(data)
            if size_bytes > MAX_MESSAGE_BYTES:
                raise httpx2.StreamError(f"it sent a message of more than {MAX_MESSAGE_BYTES // 1_000_000} MB")
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()
