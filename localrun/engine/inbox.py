"""Work from an engine's reader thread for its main thread.

A SimpleQueue, because a signal handler puts into it too: its `put` may interrupt itself, which a lock or an event would
not survive.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Generic, TypeVar

E = TypeVar("E")


class Inbox(Generic[E]):
    """See the module. `E` is what the work is done on: the engine."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Callable[[E], None] | None] = queue.SimpleQueue()
        self.exit_code = 0

    def put(self, item: Callable[[E], None]) -> None:
        self._items.put(item)

    def leave(self, exit_code: int) -> None:
        """Let the main loop end."""
        self.exit_code = self.exit_code or exit_code
        self._items.put(None)

    def drain(self, engine: E, *, wait: bool, timeout_s: float | None = None) -> bool:
        """Run everything that waits; first sleep until there is something, or for so long, if `wait`. False when it is
        time to go."""
        try:
            while (item := self._items.get(wait, timeout_s)) is not None:
                item(engine)
                wait = False
        except queue.Empty:
            return True
        return False
