"""When a dead engine may be started again."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from localrun import wire
from localrun.errors import EngineDied
from localrun.server.engines.faults import (
    DEATHS_TO_OPEN,
    EARLY_S,
    FIRST_DELAY_S,
    OPEN_S,
    SILENT_ON_DEVICE_S,
    SILENT_S,
    Breaker,
    StallWatch,
    _Work,
)
from localrun.server.engines.link import PREPARING_AFTER_S
from localrun.server.jobs.job import JobRequest
from tests.server.waiting import until

DEATH = EngineDied("it died")


def test_the_first_death_delays_nothing() -> None:
    breaker = Breaker()
    breaker.died(100.0, 0.0, DEATH)
    assert breaker.delay_s(100.0) == 0.0
    assert breaker.closed_for_s(100.0) == 0.0


def test_a_second_early_death_delays_the_next_start() -> None:
    breaker = Breaker()
    breaker.died(100.0, 5.0, DEATH)
    breaker.died(101.0, 0.0, DEATH)
    assert breaker.delay_s(101.0) == FIRST_DELAY_S
    assert breaker.delay_s(101.0 + FIRST_DELAY_S) == 0.0
    assert breaker.closed_for_s(101.0) == 0.0


def test_the_third_early_death_closes_the_door_for_a_while() -> None:
    breaker = Breaker()
    for second in range(DEATHS_TO_OPEN):
        breaker.died(100.0 + second, 0.0, DEATH)
    last_s = 100.0 + DEATHS_TO_OPEN - 1
    assert breaker.closed_for_s(last_s) == OPEN_S
    assert breaker.closed_for_s(last_s + OPEN_S) == 0.0
    assert breaker.last_error is DEATH


def test_after_the_door_opened_one_more_early_death_closes_it_again() -> None:
    breaker = Breaker()
    for _ in range(DEATHS_TO_OPEN):
        breaker.died(100.0, 0.0, DEATH)
    breaker.died(140.0, 1.0, DEATH)
    assert breaker.closed_for_s(140.0) == OPEN_S


def test_a_death_after_a_long_life_clears_the_count() -> None:
    breaker = Breaker()
    breaker.died(100.0, 0.0, DEATH)
    breaker.died(101.0, 0.0, DEATH)
    breaker.died(500.0, EARLY_S + 1, DEATH)
    breaker.died(501.0, 0.0, DEATH)
    assert breaker.closed_for_s(501.0) == 0.0
    assert breaker.delay_s(501.0) == 0.0


def test_an_engine_that_has_answered_did_not_die_of_its_file():
    breaker = Breaker()
    for now_s in (100.0, 130.0, 160.0, 190.0):
        breaker.died(now_s, 1.0, DEATH, has_answered=True)
        assert breaker.closed_for_s(now_s) == breaker.delay_s(now_s) == 0.0
    for now_s in (200.0, 201.0, 202.0):
        breaker.died(now_s, 1.0, DEATH)
    assert breaker.closed_for_s(202.0) > 0


@pytest.mark.parametrize("resume", ["on", "off"])
async def test_a_stopped_engine_is_killed_and_its_job_goes_on_or_ends(running: Any, submit: Any, resume: str) -> None:
    async with running(step_ms=2, resume=resume) as runtime, runtime.job(JobRequest(model="alpha", api="/test")) as job:
        await submit(job, n_predict=100)
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
        if resume == "off":
            with pytest.raises(EngineDied, match="hung"):
                async for _ in job:
                    pass
            return
        assert [delta.finish async for delta in job][-1] is wire.Finish.LENGTH
        assert (job.record.n_output, job.record.resumed) == (100, 1)


async def test_a_busy_engine_is_left_alone_however_silent(
    running: Any, submit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_s = iter([1.0, 11.0, 21.0])
    monkeypatch.setattr("localrun.server.engines.faults._work", lambda pid, is_loading: _Work(next(used_s), 0))
    async with running(step_ms=2) as runtime, runtime.job(JobRequest(model="alpha", api="/test")) as job:
        await submit(job, n_predict=100_000)
        await anext(job)
        link = job.link
        assert link is not None
        watch = StallWatch(lambda: [link])
        for look in range(3):
            watch.check(link.last_frame_s + SILENT_S + 1 + 10 * look)
        await asyncio.sleep(0.05)
        assert link.error is None


@pytest.mark.parametrize("has_devices", [True, False])
def test_a_load_onto_a_device_may_be_silent_for_as_long_as_a_driver_compiles(
    monkeypatch: pytest.MonkeyPatch, has_devices: bool
) -> None:
    monkeypatch.setattr("localrun.server.engines.faults._work", lambda pid, is_loading: _Work(1.0, 0))
    killed: list[str] = []
    state = {"is_loading": True, "n_outstanding": 0, "is_preparing": False, "is_on_device": False}
    link: Any = SimpleNamespace(pid=7, last_frame_s=0.0, kill=killed.append, **state)

    class Link(SimpleNamespace):
        __hash__ = object.__hash__

    watch = StallWatch(lambda: [Link(**vars(link))], has_devices=lambda: has_devices)
    for silent_s in (SILENT_S + 1, SILENT_S + 11):
        watch.check(silent_s)
    assert bool(killed) != has_devices
    for silent_s in (SILENT_ON_DEVICE_S + 1, SILENT_ON_DEVICE_S + 11):
        watch.check(silent_s)
    assert killed


async def test_a_device_that_is_being_prepared_is_no_hang(
    running: Any, submit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing comes and no processor time is used, for a driver may compile elsewhere."""
    caplog.set_level("INFO")
    async with running(step_ms=2, resume="off") as runtime, runtime.job(JobRequest(model="alpha", api="/test")) as job:
        await submit(job, n_predict=100_000)
        await anext(job)
        link = job.link
        assert link is not None
        link.ready = msgspec.structs.replace(link.ready, n_gpu_layers=3)
        assert not link.is_preparing
        os.kill(link.pid or 0, signal.SIGSTOP)
        await asyncio.sleep(0.1)
        link.last_frame_s -= PREPARING_AFTER_S + 1
        assert link.is_preparing
        [row] = runtime.supervisor.loaded()
        assert (row.is_preparing, row.slots_busy) == (True, 1)
        watch = StallWatch(lambda: [link])
        for silent_s in (SILENT_S + 1, SILENT_S + 11, SILENT_ON_DEVICE_S - 1):
            watch.check(link.last_frame_s + silent_s)
        assert link.error is None
        assert caplog.text.count("preparing the device for 'alpha'") == 1
        for silent_s in (SILENT_ON_DEVICE_S + 1, SILENT_ON_DEVICE_S + 11):
            watch.check(link.last_frame_s + silent_s)
        with pytest.raises(EngineDied, match="hung"):
            async for _ in job:
                pass


async def test_a_look_that_fails_is_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("localrun.server.engines.faults.CHECK_EVERY_S", 0.001)
    looks: list[int] = []

    def links() -> list[Any]:
        looks.append(1)
        if len(looks) == 1:
            raise ValueError("/proc says nonsense")
        return []

    watching = asyncio.create_task(StallWatch(links).run())
    await until(lambda: len(looks) > 2)
    watching.cancel()
    assert caplog.text.count("the engines could not be looked at") == 1


async def test_an_idle_engine_owes_nothing(running: Any, generate: Any) -> None:
    async with running() as runtime:
        await generate(runtime)
        link = runtime.supervisor.residents()[0].link
        watch = StallWatch(lambda: [link])
        for look in range(3):
            watch.check(link.last_frame_s + 1000 + 10 * look)
        await asyncio.sleep(0.05)
        assert link.error is None
