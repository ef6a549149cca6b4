"""The one bounded buffer between an engine's steps and the task that serves a client.

Runs in the daemon's event loop. The link puts a step's delta by a plain call; the consumer is woken once, however many
are there, and takes them without another task switch.

Invariant: at most `MAX_DELTAS` deltas and `MAX_TEXT_CHARS` of text are kept; who is further behind loses them all and
gets an error, so a client that does not read costs bounded memory.

Does not: cancel anything in the engine (`Job` does).
"""

from __future__ import annotations

import asyncio
from collections import deque

from localrun import wire
from localrun.errors import by_code

MAX_DELTAS = 4096
MAX_TEXT_CHARS = 8 * 1024 * 1024


class DeltaBuffer:
    """See the module. One consumer only."""

    def __init__(self) -> None:
        self._deltas: deque[wire.Delta] = deque()
        self._text_chars = 0
        self._failure: Exception | None = None
        self._is_finished = False
        self._wake: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._deltas)

    @property
    def is_full(self) -> bool:
        return len(self._deltas) >= MAX_DELTAS or self._text_chars >= MAX_TEXT_CHARS

    def put(self, delta: wire.Delta) -> None:
        self._deltas.append(delta)
        self._text_chars += len(delta.text)
        self._notify()

    def fail(self, error: Exception) -> None:
        """After what is kept, `take` raises this."""
        self._failure = error
        self._notify()

    def clear(self) -> None:
        """Forgets what is kept."""
        self._deltas.clear()
        self._text_chars = 0

    async def take(self) -> wire.Delta:
        """The next delta, the final one included.

        Raises what a final delta reports as an error, what `fail` was given, and StopAsyncIteration after the end.
        """
        while not self._deltas:
            if self._failure is not None:
                raise self._failure
            if self._is_finished:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        delta = self._deltas.popleft()
        self._text_chars -= len(delta.text)
        if delta.finish is not None:
            self._is_finished = True
            if delta.finish is wire.Finish.ERROR:
                message = delta.error_message or "the engine gave no reason"
                raise by_code(delta.error_code or "", message, retry_after_s=delta.retry_after_s)
        return delta

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
