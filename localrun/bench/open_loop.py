"""Sends requests at times that were decided beforehand, however slow the answers are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from localrun.bench.record import StreamRecord
from localrun.bench.streams import Stream


async def open_loop(arrivals_s: Sequence[float], begin: Callable[[int, float], Stream]) -> list[StreamRecord]:
    """Call `begin(index, intended_at_s)` at each of the times (seconds from now) and wait for all answers.

    A request that is sent late, because this process was busy, is still measured from when it should have been.
    """
    start_s = time.perf_counter()
    streams = []
    for index, arrival_s in enumerate(arrivals_s):
        await asyncio.sleep(max(0.0, start_s + arrival_s - time.perf_counter()))
        streams.append(begin(index, start_s + arrival_s))
    return list(await asyncio.gather(*(stream.task for stream in streams)))
