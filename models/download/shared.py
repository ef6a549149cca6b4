"""What all transfers of one fetch share. Owned by the event loop of the fetch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple, TypeVar

import httpx2

from localrun.models.download.item import FetchLimits, Progress
from localrun.models.download.pace import Pace

_T = TypeVar("_T")


class Shared(NamedTuple):
    client: httpx2.AsyncClient
    limits: FetchLimits
    pace: Pace
    executor: Executor
    progress: Progress

    async def in_thread(self, work: Callable[[], _T], stop: threading.Event | None = None) -> _T:
        """Waits for the work even when cancelled (`stop` is set then): no file is closed under a thread that writes."""
        future = asyncio.get_running_loop().run_in_executor(self.executor, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if stop is not None:
                stop.set()
            await asyncio.wait([future])
            raise
