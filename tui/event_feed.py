"""Keeps one event stream open, for as long as the app runs.

Runs as one worker of the app. Every snapshot and every change of the connection is handed on; a stream that ends or
fails is opened again after a pause that grows, and at once when asked. Nothing else polls the daemon.

Does not: keep snapshots, or touch widgets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from localrun.errors import LocalrunError
from localrun.snapshot import Snapshot
from localrun.tui.daemon import Daemon

RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)

SNAPSHOTS_PER_S = 4


class EventFeed:
    """`on_snapshot` gets every snapshot; `on_lost` why the stream ended, each time it did.

    `retry_delays_s` are the pauses after the first, second, ... failure in a row; the last one repeats.
    """

    def __init__(
        self,
        daemon: Daemon,
        *,
        on_snapshot: Callable[[Snapshot], None],
        on_lost: Callable[[str], None],
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
    ) -> None:
        self._daemon = daemon
        self._on_snapshot = on_snapshot
        self._on_lost = on_lost
        self._retry_delays_s = retry_delays_s
        self._retry = asyncio.Event()

    async def run(self) -> None:
        """Never returns; ends by being cancelled."""
        failures = 0
        while True:
            reason = "it closed the connection"
            try:
                async with aclosing(self._daemon.events(SNAPSHOTS_PER_S)) as snapshots:
                    async for snapshot in snapshots:
                        failures = 0
                        self._on_snapshot(snapshot)
            except LocalrunError as error:
                reason = error.message
            self._on_lost(reason)
            await self._pause(self._retry_delays_s[min(failures, len(self._retry_delays_s) - 1)])
            failures += 1

    def retry_now(self) -> None:
        """Ends the current pause, if there is one."""
        self._retry.set()

    async def _pause(self, delay_s: float) -> None:
        self._retry.clear()
        try:
            async with asyncio.timeout(delay_s):
                await self._retry.wait()
        except TimeoutError:
            return
