"""What the connections of one fetch share: how many there are, how fast they read, and when a server asked for rest.

Owned by the event loop of the fetch.
"""

from __future__ import annotations

import asyncio
import random
import time

from localrun.errors import DownloadFailed
from localrun.models.download.answer import PassingFailure
from localrun.models.download.item import FetchLimits
from localrun.models.download.rate import RateLimit
from localrun.models.download.retry import backoff_s

_KEPT = "what was transferred is kept, pull again to go on"


class Pace:
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
