"""Tells the service manager that started the daemon how it is: systemd's notify protocol, one datagram per change.

Runs in the daemon. Without NOTIFY_SOCKET (another service manager, or none) nothing is sent. A notification that cannot
be delivered is logged and in nobody's way: the daemon works without being watched.

Does not: keep the address in the environment, where engines would inherit it and could speak for the daemon.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping

READY = "READY=1"
STOPPING = "STOPPING=1"

_log = logging.getLogger(__name__)


class ServiceNotify:
    """Takes the address out of `environ`, once, at start."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")

    def send(self, state: str, status: str = "") -> None:
        """Send READY or STOPPING, with a line that `systemctl status` shows."""
        if not self._address:
            return
        # A leading @ is how the environment writes the NUL of Linux's abstract names.
        name = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        message = f"{state}\nSTATUS={status}" if status else state
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.connect(name)
                sender.sendall(message.encode())
        except (OSError, AttributeError, ValueError) as error:  # Windows' Python has no AF_UNIX
            _log.warning("the service manager cannot be told %s: %s", state, error)
