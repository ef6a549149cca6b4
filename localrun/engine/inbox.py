"""The way into an engine's main thread, and the only place where that thread sleeps.

Owner: any thread puts, and a signal handler; the main thread drains.
Does not: know what the work is.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from typing import Generic, TypeVar

E = TypeVar("E")
# How long a step waits itself, where nobody drains an inbox for it.
NAP_S = 0.005


def _nothing(_: object) -> None:
    """Something to look at, and nothing to do."""


class Inbox(Generic[E]):
    """Work from other threads. `E` is what the work is done on: the engine.

    A SimpleQueue, because a signal handler puts into it too: its `put` may interrupt itself, which a lock or an event
    would not survive.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Callable[[E], None] | None] = queue.SimpleQueue()
        self.exit_code = 0
        self._should_abort = False

    def put(self, item: Callable[[E], None], *, preempts: bool = False) -> None:
        """More work. It `preempts` if a step of the lowest lane should be aborted for it."""
        self._items.put(item)
        if preempts:
            self._should_abort = True

    def ring(self) -> None:
        """Something beside the steps is over: the main thread should look."""
        self._items.put(_nothing)

    def should_abort(self) -> bool:
        """Whether there may be work that preempts."""
        return self._should_abort

    @property
    def has_work(self) -> bool:
        return not self._items.empty()

    def leave(self, exit_code: int) -> None:
        """Let the main loop end."""
        self.exit_code = self.exit_code or exit_code
        self._items.put(None)

    def drain(self, engine: E, wait_s: float | None = 0.0) -> bool:
        """Do everything that is there; first sleep until there is something, for so long at most, None or infinity for
        as long as it takes. False when it is time to go."""
        self._should_abort = False
        may_wait, timeout_s = wait_s != 0, None if wait_s == math.inf else wait_s
        try:
            while (item := self._items.get(may_wait, timeout_s)) is not None:
                item(engine)
                may_wait = False
        except queue.Empty:
            return True
        return False


class Naps:
    """The waits of an engine: whoever gives a `ring` waits between the steps, else each step waits a little itself."""

    def __init__(self, ring: Callable[[], None] | None) -> None:
        self._inbox: Inbox[None] | None = None
        if ring is None:
            self._inbox = Inbox()
            ring = self._inbox.ring
        self.ring = ring

    def take(self, wait_s: float) -> None:
        """Before a step that has nothing to do for so long."""
        if self._inbox is not None and wait_s:
            self._inbox.drain(None, min(wait_s, NAP_S))
