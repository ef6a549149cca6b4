"""Waiting in tests of the daemon for what happens in its own time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from localrun.errors import LocalrunError
from localrun.server.runtime import Runtime


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that happens in its own time. Fails after a minute."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        await asyncio.sleep(0.005)


async def error_of(waiting: Awaitable[object]) -> LocalrunError:
    """The error that `waiting` ends with. Fails when it ends well."""
    with pytest.raises(LocalrunError) as caught:
        await waiting
    return caught.value


def n_resumed(runtime: Runtime, model: str = "alpha") -> int:
    """How often requests went on on another engine, ever: rows of requests that have ended are dropped."""
    registry = runtime.telemetry.metrics.registry
    return int(registry.get_sample_value("localrun_requests_resumed_total", {"model": model}) or 0)
