"""Notices an engine that hangs: it owes answers, says nothing, and does not compute either.

Runs as one task in the daemon's event loop. A step may honestly take minutes (a large prompt, a large model, a slow
machine), so silence alone proves nothing. Silence while the process used no CPU time does: it is stopped, or it waits
for something that does not come. Such an engine is killed; its jobs end with EngineDied, and a new one can start.

Does not: judge engines without outstanding requests, or ones that are loading (the load has its own time limit).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import psutil

from localrun.server.engines.link import EngineLink

CHECK_EVERY_S = 10.0
SILENT_S = 30.0
LEAST_CPU_S = 0.05  # per check; a waiting thread or two still costs a few milliseconds


class StallWatch:
    """See the module. `links` gives the engines that are ready."""

    def __init__(self, links: Callable[[], Iterable[EngineLink]]) -> None:
        self._links = links
        self._cpu_s: dict[int, float] = {}

    async def run(self) -> None:
        """Checks for ever; cancel it to end it."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            self.check(time.monotonic())

    def check(self, now_s: float) -> None:
        """One look at every engine; two looks in a row without CPU time and with silence end it."""
        seen: dict[int, float] = {}
        for link in list(self._links()):
            pid = link.pid
            if pid is None or link.is_starting_again or not link.n_outstanding or now_s - link.last_frame_s < SILENT_S:
                continue
            cpu_s = _cpu_seconds(pid)
            if cpu_s is None:
                continue
            seen[pid] = cpu_s
            if pid in self._cpu_s and cpu_s - self._cpu_s[pid] < LEAST_CPU_S:
                link.kill(f"hung: no step for {now_s - link.last_frame_s:.0f} seconds and no CPU time used")
        self._cpu_s = seen


def _cpu_seconds(pid: int) -> float | None:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)
