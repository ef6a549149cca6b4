"""Small documents from a server that nobody has vouched for: a manifest, a system prompt, a licence.

Runs in the daemon's event loop. The body is read as it comes and dropped at its limit, without decompression (a few
bytes that unpack to gigabytes are refused, not unpacked). Redirects are followed a few times, never from https to http.
Messages name the server and the status, and never quote the body: it may come from a server on this network that the
one who asked has no business reading.

Does not: fetch files (`download` does), or know what a document means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import urljoin, urlsplit

import httpx2

from localrun.errors import DownloadFailed, SourceRefused

MAX_REDIRECTS = 5
ATTEMPTS = 4
BACKOFF_S = 0.5
TIMEOUT_S = 30.0

_REDIRECTS = frozenset({301, 302, 303, 307, 308})


async def get(
    client: httpx2.AsyncClient, url: str, *, limit_bytes: int, headers: Mapping[str, str] | None = None
) -> bytes:
    """The body of a 200 answer. Tries again, a few times, when the answer breaks off or the server is overloaded.

    Raises SourceRefused with the status for every other answer, DownloadFailed when there is none, or too much of it.
    """
    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, body = await _follow(client, url, limit_bytes, headers or {})
        except TimeoutError:
            problem = f"no answer in {TIMEOUT_S:g} s"
            continue
        except httpx2.ConnectError as error:
            # No network, or nobody there: who waits for that can ask again.
            problem = str(error) or type(error).__name__
            break
        except httpx2.HTTPError as error:
            problem = str(error) or type(error).__name__
            continue
        if status == 200:
            return body
        if status != 429 and status < 500:
            raise SourceRefused(f"{_host(url)} answered with status {status}", source_status=status)
        problem = f"status {status}"
    raise DownloadFailed(f"{_host(url)} cannot be reached: {problem}; check the connection and pull again")


async def _follow(
    client: httpx2.AsyncClient, url: str, limit_bytes: int, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    for _ in range(MAX_REDIRECTS + 1):
        sent = {**headers, "Accept-Encoding": "identity"}
        async with client.stream("GET", url, headers=sent, follow_redirects=False) as response:
            location = response.headers.get("Location", "")
            if response.status_code not in _REDIRECTS or not location:
                return response.status_code, await _body(response, limit_bytes) if response.is_success else b""
        target = urljoin(url, location)
        scheme = urlsplit(target).scheme
        if scheme != "https" and scheme != urlsplit(url).scheme:
            raise DownloadFailed(f"{_host(url)} sends us on to an address that is not https; this is not followed")
        url = target
    raise DownloadFailed(f"{_host(url)} sends us on more than {MAX_REDIRECTS} times")


async def _body(response: httpx2.Response, limit_bytes: int) -> bytes:
    if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
        raise DownloadFailed(f"{response.url.host} sent a compressed answer that was not asked for")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > limit_bytes:
            raise DownloadFailed(f"{response.url.host} sent more than {limit_bytes} bytes where a small text belongs")
    return bytes(body)


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]
