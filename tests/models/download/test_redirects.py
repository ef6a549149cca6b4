"""Which addresses a server may send us on to."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from localrun.errors import SourceRefused
from localrun.models.download.ranges import RedirectPolicy


class Stream:
    def __init__(self, address: str) -> None:
        self._address = address

    def get_extra_info(self, _: str) -> Any:
        return (self._address, 443)


async def walked(*addresses: str) -> None:
    """From one name to the next, each of which is at one of these addresses."""
    policy = RedirectPolicy()
    for number, address in enumerate(addresses):
        request = httpx2.Request("GET", f"https://host{number}.example/")
        policy.check_url(request.url)
        await policy.check_answer(httpx2.Response(200, request=request, extensions={"network_stream": Stream(address)}))


@pytest.mark.parametrize(
    "addresses",
    [
        ("1.1.1.1", "8.8.8.8"),
        ("127.0.0.1", "127.0.0.1", "1.1.1.1"),
        ("192.168.1.5", "10.0.0.1"),
        ("::1", "127.0.0.1"),
        ("100.64.0.1", "10.0.0.1"),
    ],
)
async def test_outwards_and_sideways(addresses: tuple[str, ...]) -> None:
    await walked(*addresses)


@pytest.mark.parametrize(
    "addresses",
    [
        ("1.1.1.1", "127.0.0.1"),
        ("1.1.1.1", "10.0.0.1"),
        ("1.1.1.1", "::ffff:127.0.0.1"),
        ("192.168.1.5", "::1"),
        ("1.1.1.1", "8.8.8.8", "fd00::1"),
        ("1.1.1.1", "100.100.100.200"),  # a cloud's credentials, and where private networks such as Tailscale's lie
        ("1.1.1.1", "64:ff9b::a00:1"),
        ("1.1.1.1", "2002:7f00:1::"),
        ("169.254.169.254",),
        ("64:ff9b::a9fe:a9fe",),
        ("127.0.0.1", "fe80::1%eth0"),
        ("127.0.0.1", "0.0.0.0"),
    ],
)
async def test_not_inwards_whatever_the_name_says(addresses: tuple[str, ...]) -> None:
    with pytest.raises(SourceRefused):
        await walked(*addresses)


async def test_an_address_that_is_written_down_is_not_even_asked() -> None:
    policy = RedirectPolicy()
    with pytest.raises(SourceRefused):
        policy.check_url(httpx2.URL("http://169.254.169.254/latest"))
    request = httpx2.Request("GET", "https://host.example/")
    await policy.check_answer(httpx2.Response(200, request=request, extensions={"network_stream": Stream("1.1.1.1")}))
    for url in ("http://127.0.0.1/", "http://localhost/", "http://[::1]/"):
        with pytest.raises(SourceRefused):
            policy.check_url(httpx2.URL(url))
