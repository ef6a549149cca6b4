"""Where the bytes of an item come from right now: the address behind its redirects, until that expires.

Owned by the event loop of the fetch; the parts of one item share a link. Hubs answer with a redirect to a signed
address at some storage, valid for minutes: it is found once, used by all parts, and found again when refused.

Invariant: the headers of an item go to its own origin only. After the first redirect to another, none of them is sent,
wherever the chain leads.

Does not: judge answers (`answer`), or try again.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import httpx2

from localrun.errors import SourceRefused
from localrun.models.download.answer import PassingFailure
from localrun.models.download.item import FetchLimits, Item
from localrun.models.download.ranges import Range

_MAX_REDIRECTS = 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# What storages answer when the signature in an address has expired, or the address moved on.
_EXPIRED_STATUSES = frozenset({400, 401, 403, 404, 410})
_CONNECT_S = 15.0


class _Place(NamedTuple):
    url: httpx2.URL
    has_headers: bool


class Link:
    def __init__(self, item: Item, client: httpx2.AsyncClient, limits: FetchLimits) -> None:
        self._item = item
        self._client = client
        self._timeout = httpx2.Timeout(limits.stall_s, connect=_CONNECT_S, pool=None)
        self._start = _Place(httpx2.URL(item.url), True)
        self._found: _Place | None = None
        self._lock = asyncio.Lock()

    @property
    def host(self) -> str:
        """Of the item's own address."""
        return self._start.url.host

    async def get(self, asked: Range, validator: str) -> httpx2.Response:
        """The answer to a request for a range: its headers have come, its body has not; the caller closes it.

        Raises SourceRefused for redirects that are not followed, and httpx2.TransportError.
        """
        place = self._found
        if place is not None:
            response = await self._send(place, asked, validator)
            if not self._has_expired(place, response):
                return response
            await response.aclose()
        async with self._lock:
            if self._found is place:
                return await self._walk(asked, validator)
        # Another part found the way in the meantime.
        return await self.get(asked, validator)

    async def _walk(self, asked: Range, validator: str) -> httpx2.Response:
        """Follows the redirects from the item's own address, and remembers where they end."""
        place = self._start
        for _ in range(_MAX_REDIRECTS):
            response = await self._send(place, asked, validator)
            if response.status_code not in _REDIRECTS:
                self._found = place if response.status_code in (200, 206) else None
                return response
            location = response.headers.get("location", "")
            await response.aclose()
            place = self._next(place, location)
        raise SourceRefused(f"{self._start.url.host} redirects {self._item.name} more than {_MAX_REDIRECTS} times")

    def _next(self, place: _Place, location: str) -> _Place:
        try:
            url = place.url.join(location)
        except httpx2.InvalidURL:
            url = httpx2.URL()
        if not location or url.scheme not in ("http", "https") or not url.host:
            raise PassingFailure(f"{place.url.host} redirects {self._item.name} to no address")
        if place.url.scheme == "https" and url.scheme == "http":
            raise SourceRefused(f"{place.url.host} redirects {self._item.name} to an unencrypted address at {url.host}")
        return _Place(url, place.has_headers and _is_same_origin(place.url, url))

    async def _send(self, place: _Place, asked: Range, validator: str) -> httpx2.Response:
        headers = dict(self._item.headers) if place.has_headers else {}
        headers["Accept-Encoding"] = "identity"
        headers["Range"] = f"bytes={asked.start}-{asked.end - 1}"
        if validator:
            headers["If-Range"] = validator
        request = self._client.build_request("GET", place.url, headers=headers, timeout=self._timeout)
        return await self._client.send(request, stream=True, follow_redirects=False)

    def _has_expired(self, place: _Place, response: httpx2.Response) -> bool:
        return place != self._start and response.status_code in _EXPIRED_STATUSES | _REDIRECTS


def _is_same_origin(one: httpx2.URL, other: httpx2.URL) -> bool:
    """The same scheme, host and port. A step up to https on the standard ports counts as the same."""
    if (one.scheme, one.host, _port(one)) == (other.scheme, other.host, _port(other)):
        return True
    return one.host == other.host and (_port(one), _port(other)) == (80, 443) and other.scheme == "https"


def _port(url: httpx2.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)
