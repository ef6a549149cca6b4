"""Engines that others end or stop, however often: no stream is lost, and only what was sent again counts as resumed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

import pytest

from localrun import wire
from localrun.errors import EngineDied
from localrun.server.engines import machine
from localrun.server.engines.faults import SILENT_S
from localrun.server.jobs.job import JobRequest
from localrun.server.runtime import Runtime
from tests.server.conftest import SCRIPT
from tests.server.waiting import n_resumed, until

ALPHA = JobRequest(model="alpha", api="/test")


@pytest.fixture(autouse=True)
def _enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills nothing meanwhile, and says so on every system."""
    monkeypatch.setattr(machine, "oom_kills", lambda: 0)


async def stream(runtime: Runtime, submit: Any, text: str, n_predict: int = 60) -> list[int]:
    async with runtime.job(ALPHA) as job:
        await submit(job, text=text, n_predict=n_predict)
        return [token for delta in [delta async for delta in job] for token in delta.tokens]


async def pid_when(runtime: Runtime, state: str, seen: set[int]) -> int:
    """An engine in that state that was not `seen` before."""

    def new() -> set[int]:
        return {row.pid for row in runtime.supervisor.loaded() if row.state == state and row.pid is not None} - seen

    await until(lambda: bool(new()))
    (pid,) = new()
    seen.add(pid)
    return pid


async def test_kills_before_any_new_token_lose_nothing(running: Any, submit: Any) -> None:
    async with running(step_ms=30) as runtime:

        def streams() -> list[asyncio.Task[list[int]]]:
            return [asyncio.create_task(stream(runtime, submit, str(number), 20)) for number in range(3)]

        expected = await asyncio.gather(*streams())
        killed = streams()
        seen: set[int] = set()
        await until(lambda: sum(row.output_tokens > 1 for row in runtime.registry.rows()[-3:]) == 3)
        for _ in range(5):
            n_before = n_resumed(runtime)
            os.kill(await pid_when(runtime, "ready", seen), signal.SIGKILL)
            await until(lambda n_before=n_before: n_resumed(runtime) > n_before)
        assert await asyncio.gather(*killed) == expected


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


async def test_loads_that_are_always_killed_are_given_up(
    running: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("localrun.server.engines.supervisor.MAX_KILLED_LOADS", 2)
    async with running(engine=[sys.executable, SCRIPT, "killed"]) as runtime:
        with pytest.raises(EngineDied, match="SIGKILL while loading"):
            async with runtime.job(ALPHA):
                pass
        assert runtime.supervisor.residents() == []
    assert caplog.text.count("it is started once more") == 2


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


async def test_a_request_that_was_not_sent_to_an_engine_did_not_resume_on_it(
    running: Any, submit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(step_ms=2) as runtime:
        acquire, links = runtime.supervisor.acquire, []

        async def acquire_with_its_turn_held(*arguments: Any, **options: Any) -> Any:
            lease = await acquire(*arguments, **options)
            links.append(lease.link)
            if len(links) == 2:
                await lease.link.turn.acquire()
            return lease

        monkeypatch.setattr(runtime.supervisor, "acquire", acquire_with_its_turn_held)
        one = asyncio.create_task(stream(runtime, submit, "x"))
        await until(lambda: bool(links) and runtime.registry.rows()[-1].output_tokens > 2)
        os.kill(links[0].pid, signal.SIGKILL)
        await until(lambda: len(links) == 2)
        os.kill(links[1].pid, signal.SIGKILL)
        await until(lambda: links[1].error is not None)
        links[1].turn.release()
        assert len(await one) == 60
        assert n_resumed(runtime) == 1


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
