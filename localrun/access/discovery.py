"""How machines of one network find each other: by the system's resolver, and by mDNS, which needs `zeroconf`, the extra
`mdns`.

A daemon that announces itself says its name, its port and the fingerprint of its certificate, which whoever looks can
compare; it proves nothing. Clients ask for the addresses of a name, and for the port of a daemon that they know by name
only.

Two machines may have one host name. zeroconf sees to it that their services have different names, but would announce
the same host for both. So a daemon looks first who has the name, and takes the next free one: `studio-2.local`.

Many Linux machines, and containers, have a resolver that knows nothing of mDNS, or that asks a distant name server
about `.local` and waits. So it gets a second; then mDNS is asked. Names of other kinds are the system's alone. What was
found counts in this process until a connection fails there (`forget`): addresses change.

Does not: import `zeroconf` unless it is used.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, NamedTuple

from localrun.access.certificate import own_addresses
from localrun.config import ConfigError
from localrun.errors import DaemonUnreachable

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf
    from zeroconf.asyncio import AsyncZeroconf

SERVICE = "_localrun._tcp.local."
LOCAL = ".local"
# A name that nobody claims in this time is free.
_PROBE_MS = 1000
_MAX_NAMES = 9
# How long a machine may have new addresses before others hear of them.
_ADDRESSES_EVERY_S = 10.0
_POLL_S = 0.05
_log = logging.getLogger(__name__)


class DiscoveredDaemon(NamedTuple):
    """A daemon that announces itself. `fingerprint` is what it says of its certificate."""

    host: str
    port: int
    addresses: tuple[str, ...]
    fingerprint: str


def is_installed() -> bool:
    """Whether there is the package for it."""
    try:
        import zeroconf  # noqa: F401
    except ImportError:
        return False
    # It tells of every interface that takes no part, with a traceback, and would write into a terminal interface.
    logging.getLogger("zeroconf").setLevel(logging.CRITICAL)
    return True


def _require() -> None:
    """Raises ConfigError without the package."""
    if not is_installed():
        raise ConfigError("mDNS needs the package zeroconf; install it with: pip install 'localrun[mdns]'")


class Announcement:
    """Of one daemon that listens at this address, on its event loop. `on_name` gets another name than the machine's,
    such as `studio-2.local`, if somebody else has that. Raises ConfigError without the package."""

    def __init__(
        self, address: IPv4Address | IPv6Address, port: int, fingerprint: str, on_name: Callable[[str], None]
    ) -> None:
        _require()
        self._address = address
        self._port = port
        self._fingerprint = fingerprint
        self._on_name = on_name
        self._zeroconf: AsyncZeroconf | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Returns at once; looking whether the name is free takes a second."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Says goodbye, so that others forget this daemon at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._zeroconf is not None:
            await self._zeroconf.async_close()
            self._zeroconf = None

    async def _run(self) -> None:
        """Never raises: a daemon that nobody finds works all the same."""
        from zeroconf import IPVersion
        from zeroconf.asyncio import AsyncZeroconf

        try:
            wants_both = self._address.version == 6
            self._zeroconf = AsyncZeroconf(ip_version=IPVersion.All if wants_both else IPVersion.V4Only)
            own = socket.gethostname().partition(".")[0] or "localrun"
            name = await self._free(own)
            if name != own:
                self._on_name(name + LOCAL)
            addresses = self._addresses()
            info = self._info(name, addresses)
            wanted = info.name
            await (await self._zeroconf.async_register_service(info, allow_name_change=True))
            if info.name != wanted:
                _log.warning("another daemon announces itself as %s; this one does as %s", wanted, info.name)
            while True:
                await asyncio.sleep(_ADDRESSES_EVERY_S)
                if (now := self._addresses()) != addresses:
                    addresses = now
                    await self._zeroconf.async_update_interfaces()
                    await (await self._zeroconf.async_update_service(self._info(name, addresses, info.name)))
        except Exception as error:  # the network, and whatever the library makes of it
            _log.warning("this machine is not announced: %s", str(error) or type(error).__name__)

    def _addresses(self) -> list[str]:
        return [str(address) for address in reached_by(self._address)]

    def _info(self, name: str, addresses: list[str], service: str = "") -> ServiceInfo:
        from zeroconf import ServiceInfo

        return ServiceInfo(
            SERVICE, service or f"{name}-{self._port}.{SERVICE}", port=self._port, server=f"{name}{LOCAL}.",
            parsed_addresses=addresses, properties={"sha256": self._fingerprint},
        )  # fmt: skip

    async def _free(self, name: str) -> str:
        """The name, or with a number what of it no other machine has. The system's own responder, or another daemon
        here, may have it: they answer with addresses of this machine."""
        assert self._zeroconf is not None
        for candidate in (name, *(f"{name}-{number}" for number in range(2, _MAX_NAMES + 1))):
            resolver = _question(candidate + LOCAL)
            await resolver.async_request(self._zeroconf.zeroconf, _PROBE_MS)
            others = set(_addresses_of(resolver)) - {str(own) for own in own_addresses()}
            if not others:
                return candidate
            _log.warning("%s%s is another machine's name already (%s)", candidate, LOCAL, ", ".join(sorted(others)))
        return name


def reached_by(address: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    """The addresses by which other machines reach a daemon that listens at this one."""
    if not address.is_unspecified:
        return [address]
    return [own for own in own_addresses() if not own.is_loopback and own.version in (4, address.version)]


# --- for clients ---


def addresses_of(host: str, seconds: float) -> list[str]:
    """Of a name that ends in `.local`, those that answer in so many seconds, IPv4 first; link-local ones of IPv6 with
    their interface. Raises ConfigError without the package."""
    _require()
    zeroconf = _zeroconf()
    if zeroconf is None:
        return []
    try:
        resolver = _question(host)
        resolver.request(zeroconf, seconds * 1000)
        return _addresses_of(resolver)
    finally:
        zeroconf.close()


def _question(host: str) -> ServiceInfo:
    """For the addresses of a name."""
    from zeroconf import AddressResolver  # type: ignore[attr-defined] # documented, and not in its __all__

    resolver: ServiceInfo = AddressResolver(f"{host}.")
    return resolver


def _addresses_of(resolver: ServiceInfo) -> list[str]:
    from zeroconf import IPVersion

    found = [
        str(one) for kind in (IPVersion.V4Only, IPVersion.V6Only) for one in resolver.ip_addresses_by_version(kind)
    ]
    return list(dict.fromkeys(found))


def ports_of(host: str, seconds: float) -> list[int]:
    """Of the daemons that announce themselves by this name; returns as soon as one answered. Raises ConfigError."""

    def is_it(one: DiscoveredDaemon) -> bool:
        return one.host.lower() == host.lower()

    return sorted({one.port for one in _find(seconds, is_it) if is_it(one)})


def find(seconds: float) -> list[DiscoveredDaemon]:
    """Those that answer in so many seconds. Raises ConfigError without the package."""
    return _find(seconds, lambda _: False)


def _find(seconds: float, is_enough: Callable[[DiscoveredDaemon], bool]) -> list[DiscoveredDaemon]:
    _require()
    from zeroconf import ServiceBrowser, ServiceListener

    found: dict[str, DiscoveredDaemon] = {}

    class Listener(ServiceListener):
        def add_service(self, zeroconf: Zeroconf, kind: str, name: str) -> None:
            try:
                info = zeroconf.get_service_info(kind, name)
            except Exception as error:  # the library refuses some names, and its thread would end: no one else is found
                _log.debug("mDNS: %r announces itself: %s", name, error)
                return
            if info is not None and info.port:
                found[name] = _announced(info)

        def update_service(self, zeroconf: Zeroconf, kind: str, name: str) -> None:
            self.add_service(zeroconf, kind, name)

        def remove_service(self, zeroconf: Zeroconf, kind: str, name: str) -> None:
            found.pop(name, None)

    zeroconf = _zeroconf()
    if zeroconf is None:
        return []
    try:
        ServiceBrowser(zeroconf, SERVICE, Listener())
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not any(is_enough(one) for one in list(found.values())):
            time.sleep(_POLL_S)
        if any(is_enough(one) for one in list(found.values())):
            time.sleep(_POLL_S)  # what came with it
    finally:
        zeroconf.close()
    return sorted(found.values())


def _zeroconf() -> Zeroconf | None:
    """None where no interface takes part."""
    from zeroconf import IPVersion, Zeroconf

    for version in (IPVersion.All, IPVersion.V4Only):  # some machines have no IPv6 at all
        try:
            return Zeroconf(ip_version=version)
        except OSError as error:
            _log.debug("mDNS: %s", error)
    return None


def _announced(info: ServiceInfo) -> DiscoveredDaemon:
    said = (info.properties or {}).get(b"sha256") or b""
    host = (info.server or "").rstrip(".")
    return DiscoveredDaemon(
        host, info.port or 0, tuple(info.parsed_scoped_addresses()), said.decode("ascii", "replace")[:95]
    )


# --- where a machine is that was named ---

_SYSTEM_S = 1.0
_MDNS_S = 3.0
# Whoever answers for a name may give any number of addresses, and each may have to be waited for.
_MAX_ADDRESSES = 8
# A cable that is pulled says nothing. Without this, whoever waits for an answer would wait for ever.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_USER_TIMEOUT_MS = 30_000

_found: dict[str, list[str]] = {}


def is_local(host: str) -> bool:
    """Whether it is a name of mDNS."""
    return host.lower().rstrip(".").endswith(LOCAL)


def addresses(host: str) -> list[str]:
    """Of a name or address, at least one. Takes up to four seconds. Raises DaemonUnreachable with the way out."""
    name = host.lower().rstrip(".")
    if name not in _found:
        found = _by_system(name, None if not is_local(name) else _SYSTEM_S)
        if not found and is_local(name):
            try:
                found = addresses_of(name, _MDNS_S)
            except ConfigError as error:
                raise DaemonUnreachable(f"this machine's resolver does not know {host}; {error}") from None
        if not found:
            raise DaemonUnreachable(_unknown(host))
        _found[name] = found[:_MAX_ADDRESSES]
    return _found[name]


def forget(host: str) -> None:
    """The next question is asked anew: nobody answered at the addresses that were found."""
    _found.pop(host.lower().rstrip("."), None)


def _unknown(host: str) -> str:
    if not is_local(host):
        return f"the name {host} is not known here; give the machine's address, or a name that its network knows"
    return (
        f"no machine on this network answers to {host}; start the daemon there with `localrun serve --announce on`, or "
        f"give the machine's address (mDNS does not reach into containers and other networks)"
    )


def _by_system(name: str, seconds: float | None) -> list[str]:
    """What it says in so many seconds; it may take much longer, and cannot be stopped."""
    said = queue.SimpleQueue[list[str]]()

    def ask() -> None:
        try:
            rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            rows = []
        said.put(list(dict.fromkeys(_scoped(row[4]) for row in rows)))

    threading.Thread(target=ask, daemon=True, name="resolver").start()
    try:
        return said.get(timeout=seconds)
    except queue.Empty:
        return []


def _scoped(address: tuple[object, ...]) -> str:
    """With the interface, where a link-local address of IPv6 needs it."""
    host = str(address[0])
    if len(address) == 4 and address[3] and "%" not in host:
        return f"{host}%{address[3]}"
    return host


def socket_options() -> list[tuple[int, int, int]]:
    """Of connections with other machines, on both sides."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        options.append((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS))
    return options


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connection with the first address that answers. Raises OSError, and as `addresses` does."""
    end_s = time.monotonic() + timeout_s
    problem: OSError | None = None
    for address in addresses(host):
        try:
            return socket.create_connection((address, port), timeout=max(end_s - time.monotonic(), timeout_s / 4))
        except OSError as error:
            problem = error
    forget(host)
    assert problem is not None
    raise problem
