"""The daemon's one listening socket.

Does not: accept connections (uvicorn does).
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys

from localrun.config import ConfigError
from localrun.errors import PortBusy


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one.

    Raises ConfigError for an address that is not loopback or that this machine does not have, and PortBusy.
    """
    address = _loopback(host)
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Elsewhere the option lets a restarted daemon take its port back at once; on Windows it would let two programs
        # share one port.
        if sys.platform == "win32":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((str(address), port))
        # Only listening finds out about another socket that was bound with the same option.
        listening.listen()
    except OSError as error:
        listening.close()
        raise _refusal(error, host, port) from None
    listening.setblocking(False)
    return listening


def url(listening: socket.socket) -> str:
    """The base URL that reaches a bound socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _loopback(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        address = ipaddress.ip_address("127.0.0.1" if host.lower() == "localhost" else host)
    except ValueError:
        raise ConfigError(f"host is {host!r}; use 127.0.0.1, ::1 or localhost") from None
    if not address.is_loopback:
        raise ConfigError(
            f"host is {host!r}, which other machines can reach; this version has no API keys, so only loopback "
            f"addresses (127.0.0.1, ::1, localhost) are accepted"
        )
    return address


def _refusal(error: OSError, host: str, port: int) -> PortBusy | ConfigError:
    if error.errno == errno.EADDRINUSE or (sys.platform == "win32" and error.errno == errno.EACCES):
        return PortBusy(
            f"port {port} of {host} is in use by another program (another localrun, or Ollama?); stop it, or choose "
            f"another port with --port or LOCALRUN_PORT"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} may not be used without special rights; choose one above 1023 with --port")
    return ConfigError(f"cannot listen on {host}, port {port}: {error.strerror or error}")
