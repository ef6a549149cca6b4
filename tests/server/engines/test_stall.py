"""An engine that hangs is found; one that is only slow is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from localrun.errors import EngineDied
from localrun.server.engines.stall import SILENT_S, StallWatch
from localrun.server.jobs.job import Ask


async def test_a_stopped_engine_is_killed_and_its_job_ends(running: Any, submit: Any) -> None:
    async with running(step_ms=2) as runtime, runtime.job(Ask(model="alpha", api="/test")) as job:
        await submit(job, n_predict=100_000)
        await anext(job)
        link = job.link
        assert link is not None
        watch = StallWatch(lambda: [link])
        os.kill(link.pid or 0, signal.SIGSTOP)
        await asyncio.sleep(0.1)
        silent_s = link.last_frame_s + SILENT_S + 1
        watch.check(silent_s)
        assert link.error is None, "one look proves nothing"
        watch.check(silent_s + 10)
        with pytest.raises(EngineDied, match="hung"):
            async for _ in job:
                pass


async def test_a_busy_engine_is_left_alone_however_silent(
    running: Any, submit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_s = iter([1.0, 11.0, 21.0])
    monkeypatch.setattr("localrun.server.engines.stall._cpu_seconds", lambda pid: next(used_s))
    async with running(step_ms=2) as runtime, runtime.job(Ask(model="alpha", api="/test")) as job:
        await submit(job, n_predict=100_000)
        await anext(job)
        link = job.link
        assert link is not None
        watch = StallWatch(lambda: [link])
        for look in range(3):
            watch.check(link.last_frame_s + SILENT_S + 1 + 10 * look)
        await asyncio.sleep(0.05)
        assert link.error is None


async def test_an_idle_engine_owes_nothing(running: Any, generate: Any) -> None:
    async with running() as runtime:
        await generate(runtime)
        link = runtime.supervisor.residents()[0].link
        watch = StallWatch(lambda: [link])
        for look in range(3):
            watch.check(link.last_frame_s + 1000 + 10 * look)
        await asyncio.sleep(0.05)
        assert link.error is None
