"""What is fetched, and above all what is not: nothing of this machine's, whatever it is called."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from localrun.errors import BadRequest, TooLarge
from localrun.models.download.ranges import is_public
from localrun.server.media.sources import Fetcher
from tests.server.media import making

OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b"
Answer = Callable[[bytes], Awaitable[bytes]]


class Site:
    """A server on loopback that answers with `answer`, and keeps the requests that came."""

    def __init__(self) -> None:
        self.answer = b""
        self.delay_s = 0.0
        self.asked: list[bytes] = []
        self.serving: set[Any] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/a.png"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.add(asyncio.current_task())
        try:
            self.asked.append(await reader.readuntil(b"\r\n\r\n"))
            await asyncio.sleep(self.delay_s)
            writer.write(self.answer)
        finally:
            writer.close()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()
    for task in made.serving:
        task.cancel()
    await asyncio.gather(*made.serving, return_exceptions=True)
    await server.wait_closed()


def loopback(**changes: Any) -> Fetcher:
    """One that asks this machine alone, which others never do."""
    return Fetcher(is_allowed=lambda address: address.is_loopback, **changes)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "192.0.0.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1",
        "fe80::1%lo", "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1",
        "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::", "2001:db8::1",
        "2001:0:4136:e378:8000:63bf:f5ff:fffe",
    ],
)  # fmt: skip
def test_addresses_that_are_not_everybody_s(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", ["1.1.1.1", "93.184.215.14", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_addresses_that_are(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://[::1]:{port}/", "http://0.0.0.0:{port}/",
        "http://127.1:{port}/", "http://2130706433:{port}/", "http://0x7f000001:{port}/", "http://[::ffff:127.0.0.1]:{port}/",
        "http://169.254.169.254/latest/meta-data", "http:127.0.0.1:{port}", "http:///x", "http://user:word@1.1.1.1/",
        "http://\x00/", "http://[::1", "https://127.0.0.1:{port}/", "http://1.1.1.1:99999/",
    ],
)  # fmt: skip
async def test_this_machine_is_not_asked(url: str, site: Site) -> None:
    site.answer = OK % (2, b"hi")
    with pytest.raises(BadRequest) as caught:
        await Fetcher(timeout_s=0.5).fetch(url.format(port=site.port), "images[0]")
    assert caught.value.field == "images[0]"
    assert site.asked == []


async def test_one_address_of_several_that_is_private_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    async def both(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, 0, 0, "", (text, 0)) for text in ("1.1.1.1", "10.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
    with pytest.raises(BadRequest, match="on this machine or its own network"):
        await Fetcher().fetch("http://two-faced.example/", "f")


async def test_the_name_is_resolved_once_and_that_address_is_asked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is somebody else the next time it is asked for does not lead anywhere else."""
    names: list[object] = []

    async def resolve(host: str, *_: object, **__: object) -> list[Any]:
        names.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo
    monkeypatch.setattr(
        loop, "getaddrinfo", lambda host, *a, **k: (resolve if "example" in host else real)(host, *a, **k)
    )
    site.answer = OK % (3, b"png")
    assert await loopback().fetch(f"http://pictures.example:{site.port}/a.png?x=1#y", "f") == b"png"
    assert names == ["pictures.example"]
    (asked,) = site.asked
    assert asked.startswith(b"GET /a.png?x=1 HTTP/1.1\r\n")
    assert f"host: pictures.example:{site.port}".encode() in asked.lower()
    assert b"cookie" not in asked.lower()
    assert b"authorization" not in asked.lower()


async def test_a_picture_comes_as_it_is(site: Site) -> None:
    site.answer = OK % (len(making.png()), making.png())
    assert await loopback().fetch(site.url, "f") == making.png()
    site.answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    assert await loopback().fetch(site.url, "f") == b"abc"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\nContent-Length: 0\r\n\r\n", "leads to another one"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answered with status 404"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n", "answered with status 200"),
        (b"not HTTP at all\r\n\r\n", "failed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", "failed"),
        (b"", "failed"),
    ],
)
async def test_other_answers_are_refused(answer: bytes, said: str, site: Site) -> None:
    site.answer = answer
    with pytest.raises(BadRequest, match=said) as caught:
        await loopback().fetch(site.url, "images[0]")
    assert caught.value.field == "images[0]"
    assert len(site.asked) == 1


async def test_size_and_time_are_bounded(site: Site) -> None:
    site.answer = OK % (1001, b"x" * 1001)
    with pytest.raises(TooLarge, match="larger than 1000 bytes"):
        await loopback(max_bytes=1000).fetch(site.url, "f")
    site.delay_s = 60
    with pytest.raises(BadRequest, match=r"did not answer within 0\.05 s"):
        await loopback(timeout_s=0.05).fetch(site.url, "f")
