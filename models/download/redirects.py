"""Where a server may send us on to: not further in than it is itself.

A registry on the internet has no business in this network, and nobody has any at the addresses where clouds hand out
credentials (169.254.169.254). What counts is the address that the connection really has, so that a name which means
another one each time it is looked up changes nothing. The answer of a refused address is not read; one that is written
as a number is not even asked. With a proxy all connections are the proxy's, and it decides.
"""

from __future__ import annotations

import ipaddress

import httpx2

from localrun.errors import SourceRefused

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class RedirectPolicy:
    """One way through redirects, from its first address on."""

    def __init__(self) -> None:
        self._depth: int | None = None

    def check_url(self, url: httpx2.URL) -> None:
        """Before a request. Raises SourceRefused."""
        address = _address("127.0.0.1" if url.host == "localhost" else url.host)
        if address is not None and (_depth(address) is None or self._depth is not None):
            self._check(url.host, address)

    async def check_answer(self, response: httpx2.Response) -> None:
        """Before the answer is read; it is closed if that is refused. Raises SourceRefused."""
        stream = response.extensions.get("network_stream")
        peer = stream.get_extra_info("server_addr") if stream is not None else None
        address = _address(str(peer[0])) if isinstance(peer, tuple) else None
        if address is None:
            return
        try:
            self._check(response.url.host, address)
        except SourceRefused:
            await response.aclose()
            raise

    def _check(self, host: str, address: _Address) -> None:
        depth = _depth(address)
        if self._depth is None:
            self._depth = depth
        if depth is None or self._depth is None or depth > self._depth:
            raise SourceRefused(f"{host} is {address}, where nothing is fetched from when a server sends us there")


def _address(text: str) -> _Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _depth(address: _Address) -> int | None:
    """0 on the internet, 1 in a private network, 2 on this machine; None where nothing is ever fetched from."""
    if address.is_link_local or address.is_unspecified:
        return None
    return 2 if address.is_loopback else 1 if address.is_private else 0
