"""Small documents from servers that nobody has vouched for."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable

import httpx2
import pytest

from localrun.errors import DownloadFailed, SourceRefused
from localrun.models.download import ollama

Answer = Callable[[httpx2.Request], httpx2.Response]
URL = "https://registry.example/v2/x"


def got(answer: Answer, *, url: str = URL, limit_bytes: int = 1000) -> bytes:
    async def run() -> bytes:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
            return await ollama.small_document(client, url, limit_bytes=limit_bytes)

    return asyncio.run(run())


def redirect(to: str) -> Answer:
    return lambda request: (
        httpx2.Response(302, headers={"Location": to})
        if str(request.url) == URL
        else httpx2.Response(200, content=body(b"x"))
    )


async def body(content: bytes) -> AsyncIterator[bytes]:
    """Content that arrives in pieces, as from a network."""
    for position in range(0, len(content), 100):
        yield content[position : position + 100]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ollama, "BACKOFF_S", 0.0)


def test_a_body_within_its_limit():
    assert got(lambda _: httpx2.Response(200, content=body(b"y" * 1000))) == b"y" * 1000
    with pytest.raises(DownloadFailed, match="more than 1000 bytes"):
        got(lambda _: httpx2.Response(200, content=body(b"y" * 1001)))


def test_a_compressed_body_is_not_unpacked():
    bomb = gzip.compress(bytes(10_000_000))[:900]
    with pytest.raises(DownloadFailed, match="compressed"):
        got(lambda _: httpx2.Response(200, content=body(bomb), headers={"Content-Encoding": "gzip"}))


def test_redirects_go_to_https_only_and_end():
    assert got(redirect("https://cdn.example/blob")) == b"x"
    assert got(redirect("/elsewhere")) == b"x"
    for target in ("http://cdn.example/blob", "file:///etc/passwd", "ftp://x/y"):
        with pytest.raises(DownloadFailed, match="not https"):
            got(redirect(target))
    with pytest.raises(DownloadFailed, match="more than 5 times"):
        got(redirect(URL))


def test_refusals_keep_their_status_and_not_their_body():
    with pytest.raises(SourceRefused) as refused:
        got(lambda _: httpx2.Response(403, content=body(b"secret of another server")))
    assert refused.value.source_status == 403
    assert "secret" not in refused.value.message


def test_an_overloaded_server_is_asked_again_and_an_absent_one_is_not():
    asked = []

    def overloaded(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        return httpx2.Response(503 if len(asked) < 3 else 200, content=body(b"z"))

    assert got(overloaded) == b"z"
    assert len(asked) == 3

    def absent(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        raise httpx2.ConnectError("nobody")

    asked.clear()
    with pytest.raises(DownloadFailed, match=r"registry\.example.*nobody"):
        got(absent)
    assert len(asked) == 1
