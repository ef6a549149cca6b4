"""Asking a server for a range of an item: proxies and redirects on the way, what an answer means, when to try again.

Owned by the event loop of the fetch; the parts of one item share a client. Hubs answer with a redirect to a signed
address at some storage, valid for minutes: it is found once, used by all parts, and found again when refused. A server
may answer with the range (206), with the whole file (200: it cannot do ranges, or the content changed since the
validator was given), with a passing failure, or with a refusal.

Invariant: the headers of an item go to its own origin only. After the first redirect to another, none of them is sent,
wherever the chain leads.

Does not: try again by itself, or read what systems keep of proxies outside the environment.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

from localrun.errors import DownloadFailed, SourceChanged, SourceRefused
from localrun.models.download.journal import Range
from localrun.models.download.plan import FetchLimits, Item

# --- proxies: httpx2 and huggingface_hub find those of the environment by themselves, and fail on one that they do not
# know when a client is made ---

_VARIABLES = ("https_proxy", "http_proxy", "all_proxy")


def named_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """The proxies by their variables, which count in lower case first. `socks` without a number is SOCKS 5, as desktops
    write it."""
    names = [each if each in environ else each.upper() for each in _VARIABLES]
    found = {name: value for name in names if (value := environ.get(name))}
    return {name: f"socks5{value[5:]}" if value.startswith("socks://") else value for name, value in found.items()}


def proxy_problem(environ: Mapping[str, str]) -> str:
    """What keeps clients from being made; "" for nothing."""
    for name, value in named_proxies(environ).items():
        try:
            httpx2.Proxy(value if "://" in value else f"http://{value}")
        except (ValueError, httpx2.InvalidURL):
            return f"{name} is {without_password(value)}, and only http, https, socks5 and socks5h proxies can be used"
    return ""


def prepare_proxies() -> None:
    """Before a client is made. Raises DownloadFailed for a proxy that no client can use."""
    os.environ.update(named_proxies(os.environ))
    if problem := proxy_problem(os.environ):
        raise DownloadFailed(f"{problem}: change that variable, or unset it, and start the daemon again")


def way_of(error: httpx2.TransportError) -> str:
    """Ends what is said of a failure to reach a server: the proxy that was in between; "" for none."""
    try:
        url = error.request.url
    except RuntimeError:  # it was told of already
        return ""
    proxies = {} if proxy_bypass(url.host) else getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return f" through the proxy {without_password(proxy)}" if proxy else ""


def without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:  # half an address, such as http://[
        return url.rpartition("@")[2]
    return url if "@" not in parts.netloc else parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]).geturl()


# --- redirects: no server sends us further in than it is itself ---
# A registry on the internet has no business in this network, and nobody has any at the addresses where clouds hand out
# credentials (169.254.169.254). What counts is the address that the connection really has, so that a name which means
# another one each time it is looked up changes nothing. The answer of a refused address is not read; one that is
# written as a number is not even asked. With a proxy all connections are the proxy's, and it decides.

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# NAT64, and the old "compatible" addresses: both end in an IPv4 address.
_EMBEDDING = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("::/96"))


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

    def _check(self, host: str, address: Address) -> None:
        depth = _depth(address)
        if self._depth is None:
            self._depth = depth
        if depth is None or self._depth is None or depth > self._depth:
            raise SourceRefused(f"{host} is {address}, where nothing is fetched from when a server sends us there")


async def check_outward(request: httpx2.Request) -> None:
    """Raises SourceRefused unless all addresses of the host are on the internet. What is not known here is a proxy's to
    look up."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(request.url.host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for address in (_address(str(info[4][0])) for info in found):
        if address is None or _depth(address) != 0:
            raise SourceRefused(
                f"{request.url.host} is on this machine or in its network; only the key of an admin may pull from there"
            )


def _address(text: str) -> Address | None:
    try:
        return _carried(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return None


def _carried(address: Address) -> Address:
    """The IPv4 address that an IPv6 address carries, which is where a packet to it may end; else the address itself."""
    if isinstance(address, ipaddress.IPv4Address) or address.is_loopback or address.is_unspecified:
        return address
    inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
    if inner is None and any(address in network for network in _EMBEDDING):
        inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return inner or address


def is_public(address: Address) -> bool:
    """Whether it is one that everybody on the internet reaches."""
    inner = _carried(address)
    return inner.is_global and not inner.is_multicast and getattr(address, "scope_id", None) is None


def _depth(address: Address) -> int | None:
    """0 on the internet, 1 in a network of somebody's own, 2 on this machine; None where nothing is ever fetched
    from."""
    if address.is_link_local or address.is_unspecified:
        return None
    return 2 if address.is_loopback else 0 if is_public(address) else 1


# --- answers ---

# What a server answers when it is busy or broken, not when the request is wrong.
PASSING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})


def backoff_s(n_failures: int, *, base_s: float, cap_s: float, draw: float) -> float:
    """The wait after the n-th failure in a row (from 1). `draw` is a random number from 0 to 1."""
    bound_s = min(cap_s, base_s * 2.0 ** min(n_failures - 1, 60))
    return bound_s * draw


def why_not(error: BaseException) -> str:
    """Why there was no answer, and by which proxy, without the system's numbers: a name that nobody knows is most often
    no network."""
    through = way_of(error) if isinstance(error, httpx2.TransportError) else ""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return f"its name is not known here, as without an internet connection{through}"
        cause = cause.__cause__ or cause.__context__
    return (re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__) + through


def retry_after_s(header: str | None, *, now: datetime) -> float | None:
    """The seconds that a Retry-After header asks for (RFC 9110, 10.2.3: seconds or a date); None if it says nothing."""
    if not header:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - now).total_seconds())


_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.IGNORECASE)
_MAX_REASON_CHARS = 300


class PassingFailure(Exception):
    """Worth another try. `wait_s` is what the server asked for."""

    def __init__(self, reason: str, *, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(frozen=True)
class RangeAnswer:
    """The body begins at byte `start` of a content of `total_bytes` (None: the server does not say).

    `validator` is the strong ETag, "" if there is none.
    """

    start: int
    total_bytes: int | None
    validator: str


def answer_of(
    status: int, headers: Mapping[str, str], asked: Range, *, name: str, host: str, now: datetime
) -> RangeAnswer:
    """The answer to a request for `asked`. `headers` has lower-case names (httpx2's does for any case).

    Raises PassingFailure, SourceChanged (416), and SourceRefused for what no other try would change.
    """
    if status in PASSING_STATUSES:
        wait_s = retry_after_s(headers.get("retry-after"), now=now)
        raise PassingFailure(f"{host} answered {status}{_reason(headers)}", wait_s=wait_s)
    if status == 416:
        raise SourceChanged(
            f"{name} is shorter on {host} than it was announced to be; pull again to get the new version"
        )
    if status not in (200, 206):
        raise SourceRefused(f"{host} refused {name} with status {status}{_reason(headers)}", source_status=status)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise DownloadFailed(f"{host} sends {name} compressed, though it was asked not to; this cannot be resumed")
    validator = strong_etag(headers.get("etag"))
    if status == 200:
        return RangeAnswer(0, _length(headers.get("content-length")), validator)
    content_range = _CONTENT_RANGE.fullmatch(headers.get("content-range", "").strip())
    if content_range is None:
        raise PassingFailure(f"{host} answered with a range without saying which")
    start, _, total_bytes = map(int, content_range.groups())
    if start != asked.start:
        raise PassingFailure(f"{host} answered with the range from {start} instead of {asked.start}")
    return RangeAnswer(start, total_bytes, validator)


def strong_etag(header: str | None) -> str:
    """An ETag that means the same bytes, as it stands in the header; "" for a weak one or none (RFC 9110, 8.8.3)."""
    text = (header or "").strip()
    return text if text.startswith('"') and text.endswith('"') and len(text) > 2 else ""


def _length(header: str | None) -> int | None:
    return int(header) if header and header.isascii() and header.isdigit() else None


def _reason(headers: Mapping[str, str]) -> str:
    """What the hub says about a failure."""
    text = headers.get("x-error-message") or headers.get("x-error-code") or ""
    return f" ({text[:_MAX_REASON_CHARS]})" if text.isprintable() and text else ""


_MAX_REDIRECTS = 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# What storages answer when the signature in an address has expired, or the address moved on.
_EXPIRED_STATUSES = frozenset({400, 401, 403, 404, 410})
_CONNECT_S = 15.0


class _Place(NamedTuple):
    url: httpx2.URL
    has_headers: bool


class RangeClient:
    def __init__(self, item: Item, client: httpx2.AsyncClient, limits: FetchLimits) -> None:
        self._item = item
        self._client = client
        self._timeout = httpx2.Timeout(limits.stall_s, connect=_CONNECT_S, pool=None)
        self._start = _Place(httpx2.URL(item.url), True)
        self._found: _Place | None = None
        self._policy = RedirectPolicy()
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
        self._policy.check_url(place.url)
        request = self._client.build_request("GET", place.url, headers=headers, timeout=self._timeout)
        response = await self._client.send(request, stream=True, follow_redirects=False)
        await self._policy.check_answer(response)
        return response

    def _has_expired(self, place: _Place, response: httpx2.Response) -> bool:
        return place != self._start and response.status_code in _EXPIRED_STATUSES | _REDIRECTS


def _is_same_origin(one: httpx2.URL, other: httpx2.URL) -> bool:
    """The same scheme, host and port. A step up to https on the standard ports counts as the same."""
    if (one.scheme, one.host, _port(one)) == (other.scheme, other.host, _port(other)):
        return True
    return one.host == other.host and (_port(one), _port(other)) == (80, 443) and other.scheme == "https"


def _port(url: httpx2.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)
