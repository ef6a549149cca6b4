"""mDNS: how machines of one network find each other. Needs `zeroconf`, the extra `mdns`.

A daemon that announces itself says its name, its port and the fingerprint of its certificate, which whoever looks can
compare; it proves nothing. `NAME.local` is found by the system's own resolver and needs nothing of this.

Does not: import `zeroconf` unless it is used.
"""

from __future__ import annotations

import logging
import socket
import time
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, NamedTuple

from localrun.access.certificate import own_addresses
from localrun.config import ConfigError

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf
    from zeroconf.asyncio import AsyncZeroconf

SERVICE = "_localrun._tcp.local."
_log = logging.getLogger(__name__)


class Announced(NamedTuple):
    """A daemon that announces itself. `fingerprint` is what it says of its certificate."""

    host: str
    port: int
    addresses: tuple[str, ...]
    fingerprint: str


def _missing() -> ConfigError:
    return ConfigError("mDNS needs the package zeroconf; install it with: pip install 'localrun[mdns]'")


class Announcement:
    """Of one daemon that listens at this address, on its event loop. Raises ConfigError without the package."""

    def __init__(self, address: IPv4Address | IPv6Address, port: int, fingerprint: str) -> None:
        try:
            import zeroconf.asyncio  # noqa: F401
        except ImportError:
            raise _missing() from None
        self._address = address
        self._port = port
        self._fingerprint = fingerprint
        self._zeroconf: AsyncZeroconf | None = None

    async def start(self) -> None:
        """Never raises: a daemon that nobody finds works all the same."""
        from zeroconf import IPVersion, ServiceInfo
        from zeroconf.asyncio import AsyncZeroconf

        name = socket.gethostname().partition(".")[0] or "localrun"
        addresses = [str(address) for address in reached_by(self._address)]
        try:
            info = ServiceInfo(
                SERVICE, f"{name}-{self._port}.{SERVICE}", port=self._port, server=f"{name}.local.",
                parsed_addresses=addresses, properties={"sha256": self._fingerprint},
            )  # fmt: skip
            self._zeroconf = AsyncZeroconf(ip_version=IPVersion.V4Only)
            await self._zeroconf.async_register_service(info, allow_name_change=True)
        except Exception as error:  # the network, and whatever the library makes of it
            _log.warning("this machine is not announced: %s", str(error) or type(error).__name__)

    async def stop(self) -> None:
        if self._zeroconf is not None:
            await self._zeroconf.async_close()
            self._zeroconf = None


def reached_by(address: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    """The addresses by which other machines reach a daemon that listens at this one."""
    if not address.is_unspecified:
        return [address]
    return [own for own in own_addresses() if not own.is_loopback and own.version in (4, address.version)]


def find(seconds: float) -> list[Announced]:
    """Those that answer in so many seconds. Raises ConfigError without the package."""
    try:
        from zeroconf import ServiceBrowser, ServiceListener, Zeroconf
    except ImportError:
        raise _missing() from None
    found: dict[str, Announced] = {}

    class Listener(ServiceListener):
        def add_service(self, zeroconf: Zeroconf, kind: str, name: str) -> None:
            info = zeroconf.get_service_info(kind, name)
            if info is not None:
                found[name] = _announced(info)

        def update_service(self, zeroconf: Zeroconf, kind: str, name: str) -> None:
            self.add_service(zeroconf, kind, name)

        def remove_service(self, zeroconf: Zeroconf, kind: str, name: str) -> None:
            found.pop(name, None)

    zeroconf = Zeroconf()
    try:
        ServiceBrowser(zeroconf, SERVICE, Listener())
        time.sleep(seconds)
    finally:
        zeroconf.close()
    return sorted(found.values())


def _announced(info: ServiceInfo) -> Announced:
    said = (info.properties or {}).get(b"sha256") or b""
    host = (info.server or "").rstrip(".")
    return Announced(host, info.port or 0, tuple(info.parsed_addresses()), said.decode("ascii", "replace")[:95])
