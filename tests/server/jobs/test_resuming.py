"""A job whose engine dies: what can happen to it until it goes on, and what else was asked of the engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import pytest

from localrun import wire
from localrun.errors import Cancelled, EngineDied, LocalrunError, Unavailable
from localrun.server.engines.resident import Use
from localrun.server.jobs.job import Job, JobRequest
from localrun.server.runtime import Runtime
from localrun.snapshot import RequestState
from tests.server.conftest import SCRIPT
from tests.server.waiting import until

ALPHA = JobRequest(model="alpha", api="/test")


def kill(runtime: Runtime, signal_number: int = signal.SIGKILL) -> None:
    for row in runtime.supervisor.loaded():
        if row.state == "ready":
            os.kill(row.pid or 0, signal_number)


async def rest(job: Job) -> list[wire.Delta]:
    return [delta async for delta in job]


async def test_all_go_on_with_one_load(running: Any, submit: Any) -> None:
    async with running(step_ms=2, slots=2) as runtime:

        async def stream(text: str) -> list[int]:
            async with runtime.job(ALPHA) as job:
                await submit(job, text=text, n_predict=60)
                return [token for delta in await rest(job) for token in delta.tokens]

        expected = [await stream(str(number)) for number in range(4)]
        streams = [asyncio.create_task(stream(str(number))) for number in range(4)]
        await until(lambda: sum(row.output_tokens > 2 for row in runtime.registry.rows()[-4:]) == 2)
        kill(runtime)
        assert [await one for one in streams] == expected
        rows = runtime.registry.rows()[-4:]
        assert [row.resumed for row in rows] == [1] * 4, "those that waited, too"
        assert [row.output_tokens for row in rows] == [60] * 4
        assert b'localrun_model_load_seconds_count{model="alpha"} 2.0' in runtime.telemetry.metrics.page("")[0]
        assert all(resident.n_leases == 0 for resident in runtime.supervisor.residents())


async def test_usage_counts_from_the_first_engine(running: Any, submit: Any) -> None:
    async with running(step_ms=2) as runtime, runtime.job(ALPHA) as job:
        await submit(job, n_predict=60)
        await anext(job)
        kill(runtime)
        final = (await rest(job))[-1]
        usage, record = final.usage, job.record
        assert usage is not None
        assert (usage.n_prompt, usage.n_cached, usage.n_output) == (5, 0, 60)
        assert record.first_token_at_s is not None
        assert record.last_token_at_s is not None
        assert usage.queued_s + usage.prefill_s < 1.0
        assert usage.decode_s == pytest.approx(record.last_token_at_s - record.first_token_at_s, abs=0.05)


async def test_a_request_can_be_cancelled_between_two_engines(running: Any, submit: Any) -> None:
    async with running(step_ms=2) as runtime, runtime.job(ALPHA) as job:
        await submit(job, n_predict=10_000)
        await anext(job)
        kill(runtime)
        await until(lambda: job.record.state is RequestState.LOADING)
        runtime.registry.cancel(job.id)
        final = (await rest(job))[-1]
        assert final.finish is wire.Finish.CANCELLED
        assert final.usage is not None
        assert final.usage.n_output == job.record.n_output > 0
        assert job.record.state is RequestState.CANCELLED
    await until(lambda: all(resident.n_leases == 0 for resident in runtime.supervisor.residents()))


async def test_a_client_that_leaves_between_two_engines_gives_the_model_back(running: Any, submit: Any) -> None:
    async with running(step_ms=2) as runtime:
        async with runtime.job(ALPHA) as job:
            await submit(job, n_predict=10_000)
            await anext(job)
            kill(runtime)
            await until(lambda: job.record.state is RequestState.LOADING)
        assert job.record.state is RequestState.CANCELLED
        async with runtime.job(ALPHA) as other:
            await submit(other, n_predict=3)
            assert (await rest(other))[-1].finish is wire.Finish.LENGTH
        assert all(resident.n_leases == 0 for resident in runtime.supervisor.residents())


async def test_the_end_of_the_daemon_ends_what_waits_for_another_engine(
    running: Any, submit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localrun.server.runtime.STOP_GRACE_S", 0.0)
    async with running(step_ms=2) as runtime, runtime.job(ALPHA) as job:
        await submit(job, n_predict=10_000)
        await anext(job)
        kill(runtime)
        await until(lambda: job.record.state is RequestState.LOADING)
        await runtime.stop()
        with pytest.raises(Unavailable):
            await rest(job)


async def test_another_file_under_the_name_is_not_gone_on_with(running: Any, submit: Any, models_dir: Any) -> None:
    async with running(step_ms=2) as runtime, runtime.job(ALPHA) as job:
        await submit(job, n_predict=10_000)
        await anext(job)
        os.utime(models_dir / "alpha.gguf", (1, 1))
        kill(runtime)
        with pytest.raises(EngineDied, match="changed"):
            await rest(job)


async def test_counting_is_asked_again(running: Any) -> None:
    async with running() as runtime, runtime.job(ALPHA) as job:
        old = job.link
        assert old is not None
        os.kill(old.pid or 0, signal.SIGSTOP)
        counting = asyncio.create_task(job.count([wire.Segment("abc")]))
        await until(lambda: old.n_outstanding == 1)
        os.kill(old.pid or 0, signal.SIGKILL)
        assert await counting == (97, 98, 99)
        assert job.link is not old


async def test_vectors_that_are_missing_are_asked_for_again(running: Any) -> None:
    inputs = [f"text number {number} " * 3 for number in range(40)]

    async def vectors(runtime: Runtime, *, is_killed: bool) -> tuple[list[wire.Vector], wire.Usage | None]:
        found: list[wire.Vector] = []
        async with runtime.job(JobRequest(model="alpha", api="/test", use=Use.EMBED)) as job:
            await job.embed(inputs)
            async for delta in job:
                found += delta.vectors or []
                if is_killed and found and job.record.resumed == 0 and delta.finish is None:
                    kill(runtime)
                    is_killed = False
            assert job.record.error is None
            return sorted(found, key=lambda vector: vector.index), job.record.usage

    async with running(step_ms=20, batch_tokens=64) as runtime:
        expected, usage = await vectors(runtime, is_killed=False)
        got, got_usage = await vectors(runtime, is_killed=True)
        assert got == expected
        assert usage is not None
        assert got_usage is not None
        assert got_usage.n_prompt == usage.n_prompt
        assert runtime.registry.rows()[-1].resumed == 1


async def test_without_resume_a_death_is_the_end(running: Any, submit: Any) -> None:
    async with running(step_ms=2, resume="off") as runtime, runtime.job(ALPHA) as job:
        await submit(job, n_predict=10_000)
        await anext(job)
        kill(runtime)
        with pytest.raises(LocalrunError, match="SIGKILL"):
            await rest(job)


async def test_a_cancel_ends_the_wait_for_those_that_come_first(running: Any, submit: Any) -> None:
    async with running() as runtime, runtime.job(ALPHA) as job:
        assert job.link is not None
        async with job.link.turn:
            submitting = asyncio.create_task(submit(job))
            await asyncio.sleep(0)
            runtime.registry.cancel(job.id)
            await submitting
        assert (await rest(job))[-1].finish is wire.Finish.CANCELLED
        assert not isinstance(job.record.error, Cancelled)


async def answers(runtime: Runtime, submit: Any, n_jobs: int) -> list[list[wire.Delta] | BaseException]:
    async def ask() -> list[wire.Delta]:
        async with runtime.job(ALPHA) as job:
            await submit(job)
            return await rest(job)

    return await asyncio.gather(*(ask() for _ in range(n_jobs)), return_exceptions=True)


@pytest.mark.parametrize("script", ["quick-load", "quick-submit"])
async def test_a_crash_before_the_first_answer_is_answered_without_the_quick_kernels(
    running: Any, submit: Any, caplog: pytest.LogCaptureFixture, script: str
) -> None:
    async with running(engine=[sys.executable, SCRIPT, script]) as runtime:
        for said in await answers(runtime, submit, 2):
            assert isinstance(said, list)
            assert sum(len(delta.tokens) for delta in said) == 2
        (resident,) = runtime.supervisor.residents()
        assert not resident.is_quick
    assert caplog.text.count("once more without the quick kernels") == 1


async def test_a_model_that_kills_every_engine_is_given_up(running: Any, submit: Any) -> None:
    async with running(engine=[sys.executable, SCRIPT, "always-submit"]) as runtime:
        ends = await answers(runtime, submit, 2)
        assert all(isinstance(end, EngineDied) and "SIGILL" in end.message for end in ends)
        assert runtime.supervisor.residents() == []
