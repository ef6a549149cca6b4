"""Frames on their way to the daemon.

Whoever has a message sends it at once, as long as the pipe takes it: waking a thread for it would take a core from the
computing threads twice per step. What the pipe does not take is left to the *writer* thread, in order, so a daemon that
is slow to read never holds up a step.

Owner: any thread may `put`. Does not: bound the backlog; a daemon that reads nothing ends the engine (`stall.py`).
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable

from localrun import framing

# Windows has no pipes that refuse instead of waiting.
_CAN_TRY = sys.platform != "win32"


class Outbox:
    """See the module. `on_broken` is called once, with the error, when the daemon is gone or the writer fails."""

    def __init__(self, descriptor: int, on_broken: Callable[[BaseException], None]) -> None:
        self._descriptor = descriptor
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._backlog: deque[bytes] = deque()
        self._has_backlog = threading.Event()
        if _CAN_TRY:
            os.set_blocking(descriptor, False)
        threading.Thread(target=self._serve, name="writer", daemon=True).start()

    def put(self, message: object) -> None:
        """Send a message after all that were put before."""
        data = framing.encode(message)
        with self._lock:
            if _CAN_TRY and not self._backlog:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:
                    pass
                except OSError as error:
                    self._on_broken(error)
                    return
            if data:
                self._backlog.append(data)
                self._has_backlog.set()

    def _serve(self) -> None:
        """Writer thread."""
        try:
            while True:
                self._has_backlog.wait()
                self._write_first()
        except BaseException as error:
            self._on_broken(error)

    def _write_first(self) -> None:
        data = self._backlog[0]
        if _CAN_TRY:
            select.select([], [self._descriptor], [])
        try:
            rest = data[os.write(self._descriptor, data) :]
        except BlockingIOError:
            return
        with self._lock:
            if rest:
                self._backlog[0] = rest
                return
            self._backlog.popleft()
            if not self._backlog:
                self._has_backlog.clear()
