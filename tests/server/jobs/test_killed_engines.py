"""Engines that others end or stop, however often: no stream is lost, and only what was sent again counts as resumed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from localrun import wire
from localrun.server.engines import machine
from localrun.server.engines.faults import SILENT_S
from localrun.server.jobs.job import Ask
from localrun.server.runtime import Runtime
from tests.server.waiting import until

ALPHA = Ask(model="alpha", api="/test")


@pytest.fixture(autouse=True)
def _enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills nothing meanwhile, and says so on every system."""
    monkeypatch.setattr(machine, "oom_kills", lambda: 0)


async def stream(runtime: Runtime, submit: Any, text: str, n_predict: int = 60) -> list[int]:
    async with runtime.job(ALPHA) as job:
        await submit(job, text=text, n_predict=n_predict)
        return [token for delta in [delta async for delta in job] for token in delta.tokens]


async def pid_when(runtime: Runtime, state: str, but: set[int], more: Callable[[], bool] = lambda: True) -> int:
    """An engine in that state that is none of those, which it joins."""

    def pids() -> list[int]:
        rows = runtime.supervisor.loaded()
        return [row.pid for row in rows if row.state == state and row.pid is not None and row.pid not in but]

    await until(lambda: bool(pids()) and more())
    but.add(pids()[0])
    return pids()[0] if pids() else max(but)


async def test_kills_before_any_new_token_lose_nothing(running: Any, submit: Any) -> None:
    async with running(step_ms=30) as runtime:
        expected = [await stream(runtime, submit, str(number), 8) for number in range(3)]
        streams = [asyncio.create_task(stream(runtime, submit, str(number), 8)) for number in range(3)]
        seen: set[int] = set()
        await until(lambda: sum(row.output_tokens > 1 for row in runtime.registry.rows()[-3:]) == 3)
        for _ in range(5):
            rows = runtime.registry.rows()[-3:]
            n_resumed = sum(row.resumed for row in rows)
            os.kill(await pid_when(runtime, "ready", seen), signal.SIGKILL)
            await until(lambda n=n_resumed: sum(row.resumed for row in runtime.registry.rows()[-3:]) > n)
        assert [await one for one in streams] == expected


async def test_kills_while_loading_lose_nothing(running: Any, submit: Any) -> None:
    async with running(step_ms=2) as runtime:
        expected = await stream(runtime, submit, "x")
        one = asyncio.create_task(stream(runtime, submit, "x"))
        await until(lambda: runtime.registry.rows()[-1].output_tokens > 2)
        seen: set[int] = set()
        os.kill(await pid_when(runtime, "ready", seen), signal.SIGKILL)
        for _ in range(5):
            os.kill(await pid_when(runtime, "loading", seen), signal.SIGKILL)
        assert await one == expected
        assert runtime.registry.rows()[-1].resumed == 1


async def test_a_stopped_load_is_noticed_and_begun_anew(running: Any, submit: Any) -> None:
    async with running(step_ms=2) as runtime:
        expected = await stream(runtime, submit, "x")
        one = asyncio.create_task(stream(runtime, submit, "x"))
        await until(lambda: runtime.registry.rows()[-1].output_tokens > 2)
        seen: set[int] = set()
        os.kill(await pid_when(runtime, "ready", seen), signal.SIGKILL)
        os.kill(await pid_when(runtime, "loading", seen), signal.SIGSTOP)
        await asyncio.sleep(0.05)
        for look in range(2):
            runtime.supervisor._stalls.check(time.monotonic() + SILENT_S + 10 * look)
        assert await one == expected


async def test_a_request_that_was_not_sent_to_an_engine_did_not_resume_on_it(running: Any, submit: Any) -> None:
    async with running(step_ms=200) as runtime:
        streams = [asyncio.create_task(stream(runtime, submit, str(number), 4)) for number in range(3)]
        await until(lambda: sum(row.output_tokens > 0 for row in runtime.registry.rows()) == 3)
        seen: set[int] = set()
        os.kill(await pid_when(runtime, "ready", seen), signal.SIGKILL)
        await until(lambda: any(row.resumed for row in runtime.registry.rows()))
        os.kill(await pid_when(runtime, "ready", seen), signal.SIGKILL)
        await asyncio.gather(*streams)
        assert sorted(row.resumed for row in runtime.registry.rows()) == [1, 1, 2]


async def test_what_is_unforeseen_while_it_resumes_ends_it(
    running: Any, submit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(step_ms=2) as runtime, runtime.job(ALPHA) as job:
        await submit(job, n_predict=10_000)
        await anext(job)

        def look_up(name: str) -> None:
            raise RuntimeError("unforeseen")

        monkeypatch.setattr(runtime.supervisor, "_look_up", look_up)
        os.kill(await pid_when(runtime, "ready", set()), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="unforeseen"):
            await asyncio.wait_for(_all(job), 20)


async def _all(job: Any) -> list[wire.Delta]:
    return [delta async for delta in job]
