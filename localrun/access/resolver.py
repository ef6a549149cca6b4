"""Where a machine is that was named: asked of the system's resolver, and for `.local` of mDNS where that does not know.

Many Linux machines, and containers, have a resolver that knows nothing of mDNS, or that asks a distant name server
about `.local` and waits. So it gets a second; then mDNS is asked, which needs the extra `mdns`. Names of other kinds
are the system's alone. What was found counts until a connection fails there (`forget`): addresses change.

Does not: keep anything but in this process.
"""

from __future__ import annotations

import queue
import socket
import threading
import time

from localrun.access import discovery
from localrun.config import ConfigError
from localrun.errors import DaemonUnreachable

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
    return host.lower().rstrip(".").endswith(discovery.LOCAL)


def addresses(host: str) -> list[str]:
    """Of a name or address, at least one. Takes up to four seconds. Raises DaemonUnreachable with the way out."""
    name = host.lower().rstrip(".")
    if name not in _found:
        found = _by_system(name, None if not is_local(name) else _SYSTEM_S)
        if not found and is_local(name):
            try:
                found = discovery.addresses_of(name, _MDNS_S)
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
