"""From what a client wrote into a field to the bytes of a file: base64, a data URI, or an address.

Base64 is strict, but for line endings, which many programs put in. A long one is decoded piece by piece, so that the
thread that does it never keeps others from running. A `data:` prefix is accepted wherever base64 is, and what type it
names does not count: the bytes decide.

Addresses are for daemons that were started with `--fetch-images on`. A daemon that fetches what a request names can be
made to ask the machine's own network: routers, other services on loopback, a cloud's metadata. So a name is resolved
once, every address of it must be a public one, and the connection goes to that very address, whatever the name resolves
to a moment later. Redirects are not followed, proxies are not used, no cookie or header of anybody's is sent, and size
and time are bounded. Fetching runs in the daemon's event loop.

Does not: look into what came (`headers.py` does), or cache it.
"""

from __future__ import annotations

import asyncio
import binascii
import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2

from localrun.errors import BadRequest, TooLarge
from localrun.models.download.ranges import Address, is_public

# A multiple of four; about a millisecond's work.
_PIECE_CHARACTERS = 512 * 1024
_DATA_URI = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]{0,20}):", re.IGNORECASE)
_MOST_QUOTED = 40


def url_of(source: str) -> str | None:
    """The source, if it is an http(s) URL."""
    found = _SCHEME.match(source)
    return source if found is not None and found[1].lower() in ("http", "https") else None


def bytes_of(source: str, field: str) -> bytes:
    """Of base64 or a data URI. Raises BadRequest naming `field`."""
    start = 0
    scheme = _SCHEME.match(source)
    if scheme is not None:
        prefix = _DATA_URI.match(source)
        if scheme[1].lower() != "data":
            raise BadRequest.of(
                field,
                f"{scheme[0][:_MOST_QUOTED]!r} addresses are not read here; send the file as base64 or as a "
                f"data URI (data:image/png;base64,...)",
            )
        if prefix is None:
            raise BadRequest.of(field, "a data URI that is not base64; use data:image/png;base64,...")
        start = prefix.end()
    made, rest, is_over = bytearray(), "", False
    try:
        for at in range(start, len(source), _PIECE_CHARACTERS):
            piece = rest + "".join(source[at : at + _PIECE_CHARACTERS].split())
            whole = len(piece) // 4 * 4
            if is_over and piece:
                raise binascii.Error("data after its end")
            made += binascii.a2b_base64(piece[:whole], strict_mode=True)
            rest, is_over = piece[whole:], piece.endswith("=", 0, whole)
        if rest and is_over:
            raise binascii.Error("data after its end")
        made += binascii.a2b_base64(rest + "=" * (-len(rest) % 4), strict_mode=True)  # some clients leave the end out
    except ValueError as error:  # binascii.Error, or letters beyond ASCII
        raise BadRequest.of(
            field,
            f"not valid base64 ({error}); send the file's bytes as base64, with or without "
            f"'data:image/png;base64,' before",
        ) from None
    return bytes(made)


# --- addresses ---

MAX_BYTES = 24 * 1024 * 1024
TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Fetcher:
    """See the module. `is_allowed` says which addresses may be asked."""

    is_allowed: Callable[[Address], bool] = is_public
    max_bytes: int = MAX_BYTES
    timeout_s: float = TIMEOUT_S

    async def fetch(self, url: str, field: str) -> bytes:
        """What is at the URL. Raises BadRequest for one that is not to be fetched or does not answer, and TooLarge."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._fetch(url, field)
        except TimeoutError:
            raise BadRequest.of(
                field, f"the address did not answer within {self.timeout_s:g} s; send the file as a data URI"
            ) from None
        except (httpx2.HTTPError, OSError) as error:
            said = str(error)[:200] or type(error).__name__
            raise BadRequest.of(field, f"fetching the address failed: {said}; send the file as a data URI") from None

    async def _fetch(self, url: str, field: str) -> bytes:
        try:
            target = httpx2.URL(url)
            _ = urlsplit(url).port  # raises for one that is none
        except (httpx2.InvalidURL, ValueError, TypeError):
            raise BadRequest.of(field, "not a valid URL; use https://host/path") from None
        if target.userinfo or not target.host:
            raise BadRequest.of(field, "a URL without a host, or with a password; use https://host/path")
        address = await self._resolved(target.host, field)
        port = "" if target.port is None else f":{target.port}"
        host = f"[{target.host}]" if ":" in target.host else target.host
        headers = {"Host": f"{host}{port}", "Accept": "image/*, audio/*", "Accept-Encoding": "identity"}
        async with (
            httpx2.AsyncClient(trust_env=False, follow_redirects=False, timeout=self.timeout_s) as client,
            client.stream(
                "GET",
                target.copy_with(host=str(address), fragment=None),
                headers=headers,
                extensions={"sni_hostname": target.host},
            ) as answer,
        ):
            if answer.is_redirect:
                raise BadRequest.of(field, "the address leads to another one, which is not followed; send that one")
            if answer.status_code != 200 or answer.headers.get("content-encoding", "identity") != "identity":
                raise BadRequest.of(
                    field, f"the address answered with status {answer.status_code}; send the file as a data URI"
                )
            data = bytearray()
            async for piece in answer.aiter_raw():
                data += piece
                if len(data) > self.max_bytes:
                    raise TooLarge.of(
                        field, f"the file at this address is larger than {self.max_bytes} bytes; send a smaller one"
                    )
        return bytes(data)

    async def _resolved(self, host: str, field: str) -> Address:
        """Raises BadRequest unless all addresses of the host may be asked: which of them is used is chance."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
            addresses = [ipaddress.ip_address(str(info[4][0])) for info in found]
        except (OSError, UnicodeError, ValueError):
            raise BadRequest.of(field, f"the host {host[:80]!r} is not known; send a data URI") from None
        if not addresses or not all(self.is_allowed(address) for address in addresses):
            raise BadRequest.of(
                field,
                f"the host {host[:80]!r} is on this machine or its own network, where nothing is fetched; "
                f"send the file as a data URI",
            )
        return addresses[0]
