"""What all transfers of one fetch share: connections, bandwidth, threads for the disk, and the rest a server asked for.

Owned by the event loop of the fetch.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

import httpx2

from localrun.errors import DownloadFailed
from localrun.models.download.plan import FetchLimits, Item, Progress
from localrun.models.download.ranges import PassingFailure, RangeClient, backoff_s


async def all_or_first_error(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Returns when all are done. The first exception cancels the others and is raised, as itself and not in a group."""
    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
    if first is not None:
        raise first


class RateLimit:
    """Shared by all connections of a fetch. Time is given by the caller, in seconds of any one clock.

    Bytes are paid for after they came, so the first are not held up; idle time is not saved up for a burst.
    """

    def __init__(self, rate_bytes_per_s: int) -> None:
        if rate_bytes_per_s < 1:
            raise ValueError("the rate must be at least 1 byte per second")
        self._rate_bytes_per_s = rate_bytes_per_s
        self._paid_until_s = float("-inf")

    def pay(self, n_bytes: int, now_s: float) -> float:
        """The seconds to wait before reading on, `n_bytes` having been read."""
        self._paid_until_s = max(self._paid_until_s, now_s) + n_bytes / self._rate_bytes_per_s
        return self._paid_until_s - now_s


_KEPT = "what was transferred is kept, pull again to go on"


class Throttle:
    def __init__(self, limits: FetchLimits) -> None:
        self.connections = asyncio.Semaphore(limits.connections)
        self._limits = limits
        self._rate = None if limits.rate_bytes_per_s is None else RateLimit(limits.rate_bytes_per_s)
        self._rest_until_s = float("-inf")

    async def rest(self) -> None:
        """Waits as long as a server wanted rest. To be called before each request."""
        if (wait_s := self._rest_until_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)

    async def received(self, n_bytes: int) -> None:
        """Waits as the bandwidth limit demands after `n_bytes` came."""
        if self._rate is not None and (wait_s := self._rate.pay(n_bytes, time.monotonic())) > 0:
            await asyncio.sleep(wait_s)

    async def failed(self, n_failures: int, failure: PassingFailure, name: str) -> None:
        """Waits after the n-th failure in a row. What a server asked for holds for every connection.

        Raises DownloadFailed when it is not worth waiting for: after too many failures, or for too long.
        """
        limits, wanted_s = self._limits, failure.wait_s
        if n_failures > limits.retries:
            raise DownloadFailed(f"{name}: {failure}, {n_failures} times in a row; {_KEPT}") from failure
        if wanted_s is not None and wanted_s > limits.longest_wait_s:
            raise DownloadFailed(
                f"{name}: {failure} and asks to wait {wanted_s:.0f} s, longer than the {limits.longest_wait_s:.0f} s "
                f"that a download waits; {_KEPT}"
            ) from failure
        if wanted_s is not None:
            self._rest_until_s = max(self._rest_until_s, time.monotonic() + wanted_s)
        draw = random.random()
        await asyncio.sleep(backoff_s(n_failures, base_s=limits.backoff_base_s, cap_s=limits.backoff_cap_s, draw=draw))
        await self.rest()


_T = TypeVar("_T")


class Shared(NamedTuple):
    client: httpx2.AsyncClient
    limits: FetchLimits
    throttle: Throttle
    executor: Executor
    progress: Progress
    source: Callable[[Item], RangeClient]

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
