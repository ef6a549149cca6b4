"""A job from its entry to its end, on fake engines: results, errors, cancels, deaths, slow and vanishing consumers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from localrun import wire
from localrun.errors import BadRequest, Cancelled, Conflict, ContextExceeded, EngineDied, LocalrunError, ModelNotFound
from localrun.server.jobs.job import Job, JobRequest
from localrun.server.runtime import Runtime
from localrun.snapshot import RequestState
from tests.server.waiting import until

SCRIPT = str(Path(__file__).parents[1] / "scripted_engine.py")
ALPHA = JobRequest(model="alpha", api="/test", client="pytest")


def _text(deltas: list[wire.Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _all_given_back(runtime: Runtime) -> bool:
    return all(resident.n_leases == 0 for resident in runtime.supervisor.residents())


async def test_a_job_gives_the_tokens_and_the_counts(running: Any, submit: Any) -> None:
    async with running() as runtime:
        async with runtime.job(ALPHA) as job:
            assert job.id.startswith("req_")
            assert job.model.name == "alpha"
            assert job.ready.n_ctx == 4096
            assert job.load_s > 0
            assert "<|im_end|>" in job.ready.control_tokens
            await submit(job, text="hello", n_predict=20)
            deltas = [delta async for delta in job]
        assert sum(len(delta.tokens) for delta in deltas) == 20
        assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish is wire.Finish.LENGTH
        assert deltas[-1].usage is not None
        assert (deltas[-1].usage.n_prompt, deltas[-1].usage.n_output) == (5, 20)
        assert job.record.state is RequestState.DONE
        assert _all_given_back(runtime)


async def test_count_gives_the_ids_that_submit_would_use(running: Any) -> None:
    async with running() as runtime, runtime.job(ALPHA) as job:
        ids = await job.count([wire.Segment("ab<|im_end|>"), wire.Segment("<|im_end|>", False)])
        assert ids[:3] == (97, 98, 257)
        assert len(ids) == 3 + len("<|im_end|>")


async def test_eight_at_once_give_what_each_gives_alone(running: Any, generate: Any) -> None:
    async with running(slots=8) as runtime:
        texts = [f"conversation {number}" for number in range(8)]
        together = await asyncio.gather(*(generate(runtime, text=text, n_predict=30) for text in texts))
        alone = [await generate(runtime, text=text, n_predict=30) for text in texts]
        assert [_text(deltas) for deltas in together] == [_text(deltas) for deltas in alone]


async def test_what_the_engine_refuses_is_raised_with_its_class(running: Any, submit: Any) -> None:
    async with running(kv_cells=256, slots=1) as runtime:
        for text, error_class, words in (("x" * 1000, ContextExceeded, "1000 tokens"), ("", BadRequest, "empty")):
            async with runtime.job(ALPHA) as job:
                await submit(job, text=text)
                with pytest.raises(error_class, match=words):
                    await anext(job)
            assert job.record.state is RequestState.FAILED
            assert words in (job.record.error or "")
        assert _all_given_back(runtime)


async def test_a_model_that_is_not_there_fails_the_job(running: Any) -> None:
    async with running() as runtime:
        with pytest.raises(ModelNotFound):
            async with runtime.job(JobRequest(model="nowhere", api="/test")):
                pytest.fail("entered")
        assert runtime.registry.idle.is_set()
        assert runtime.registry.rows()[0].state is RequestState.FAILED
        assert "nowhere" in (runtime.registry.rows()[0].error or "")


async def test_leaving_early_cancels_in_the_engine(running: Any, submit: Any, generate: Any) -> None:
    async with running(step_ms=2) as runtime:
        async with runtime.job(ALPHA) as job:
            await submit(job, n_predict=100_000)
            await anext(job)
            link = job.link
        assert link is not None
        assert job.record.state is RequestState.CANCELLED
        await until(lambda: link.n_outstanding == 0)
        assert (await generate(runtime, n_predict=3))[-1].finish is wire.Finish.LENGTH


async def test_a_consumer_whose_task_is_cancelled_is_a_cancel_and_frees_the_slot(running: Any, submit: Any) -> None:
    async with running(step_ms=2) as runtime:
        jobs: list[Job] = []

        async def client() -> None:
            async with runtime.job(ALPHA) as job:
                jobs.append(job)
                await submit(job, n_predict=100_000)
                async for _ in job:
                    pass

        task = asyncio.create_task(client())
        await until(lambda: bool(jobs) and jobs[0].record.n_output > 3)
        link = jobs[0].link
        assert link is not None
        task.cancel()
        await asyncio.wait([task])
        assert jobs[0].record.state is RequestState.CANCELLED
        await until(lambda: link.n_outstanding == 0)
        assert _all_given_back(runtime)


async def test_cancel_through_the_registry_gives_the_cancelled_delta(running: Any, submit: Any) -> None:
    async with running(step_ms=2) as runtime, runtime.job(ALPHA) as job:
        await submit(job, n_predict=100_000)
        deltas = [await anext(job)]
        runtime.registry.cancel(job.id)
        deltas += [delta async for delta in job]
        assert deltas[-1].finish is wire.Finish.CANCELLED
        assert deltas[-1].usage is not None
        assert job.record.state is RequestState.CANCELLED
        with pytest.raises(Conflict):
            runtime.registry.cancel(job.id)


async def test_cancel_before_submit_never_reaches_the_engine(running: Any, submit: Any) -> None:
    async with running() as runtime, runtime.job(ALPHA) as job:
        runtime.registry.cancel(job.id)
        await submit(job)
        assert [delta.finish for delta in [delta async for delta in job]] == [wire.Finish.CANCELLED]
        assert job.link is not None
        assert job.link.stats is None


async def test_cancel_while_loading_raises_and_leaves_the_load_alone(running: Any) -> None:
    async with running() as runtime:
        loading = runtime.job(ALPHA)
        entering = asyncio.create_task(loading.__aenter__())
        await until(lambda: bool(runtime.supervisor.residents()))
        runtime.registry.cancel(loading.id)
        with pytest.raises(Cancelled):
            await entering
        assert loading.record.state is RequestState.CANCELLED
        async with runtime.job(ALPHA) as job:
            assert job.model.name == "alpha"
        assert _all_given_back(runtime)


async def test_without_resume_a_killed_engine_ends_its_jobs_at_once_and_others_go_on(
    running: Any, submit: Any, generate: Any
) -> None:
    async with running(step_ms=2, resume="off") as runtime:
        ends: list[tuple[str, LocalrunError | None]] = []

        async def stream(model: str, n_predict: int) -> None:
            async with runtime.job(JobRequest(model=model, api="/test")) as job:
                await submit(job, n_predict=n_predict)
                try:
                    async for _ in job:
                        pass
                except LocalrunError as error:
                    ends.append((model, error))
                else:
                    ends.append((model, None))

        doomed = [asyncio.create_task(stream("alpha", 100_000)) for _ in range(3)]
        safe = asyncio.create_task(stream("beta", 1_000))
        await until(lambda: sum(row.output_tokens > 2 for row in runtime.registry.rows()) == 4)
        pid = next(row.pid for row in runtime.supervisor.loaded() if row.model == "alpha")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait(doomed)
        assert [model for model, _ in ends] == ["alpha"] * 3, "they ended before the other's answer did"
        assert all(isinstance(error, EngineDied) and "SIGKILL" in error.message for _, error in ends)
        assert (await generate(runtime, "alpha", n_predict=3))[-1].finish is wire.Finish.LENGTH
        await safe
        assert ends[-1] == ("beta", None)
        states = sorted(row.state for row in runtime.registry.rows() if row.model == "alpha")
        assert states == [RequestState.DONE, *[RequestState.FAILED] * 3]


async def test_a_consumer_that_does_not_read_is_cancelled(running: Any, submit: Any) -> None:
    async with running(engine=[sys.executable, SCRIPT, "flood"]) as runtime:
        async with runtime.job(ALPHA) as job:
            await submit(job)
            await until(lambda: job.record.is_ended)
            assert job.link is not None
            assert not job.has_ready, "what it did not read is dropped"
            with pytest.raises(Cancelled, match="too slowly"):
                await anext(job)
            await until(lambda: job.link is not None and job.link.n_outstanding == 0)
        assert job.record.state is RequestState.CANCELLED


async def test_an_error_of_the_api_module_is_shown_as_a_failure(running: Any) -> None:
    async with running() as runtime:
        with pytest.raises(BadRequest):
            async with runtime.job(ALPHA) as job:
                raise BadRequest("the template refused it")
        assert job.record.state is RequestState.FAILED
        assert job.record.error == "the template refused it"
        assert _all_given_back(runtime)


async def test_a_job_that_only_loads_is_done(running: Any) -> None:
    async with running() as runtime:
        async with runtime.job(ALPHA) as job:
            pass
        assert job.record.state is RequestState.DONE
        assert [row.model for row in runtime.supervisor.loaded()] == ["alpha"]


async def test_a_second_submit_is_a_mistake(running: Any, submit: Any) -> None:
    async with running() as runtime, runtime.job(ALPHA) as job:
        await submit(job)
        with pytest.raises(RuntimeError, match="once"):
            await submit(job)


async def test_a_storm_of_jobs_that_end_in_every_way_leaves_nothing(running: Any, submit: Any) -> None:
    async with running(slots=4, step_ms=1, max_queue=1000) as runtime:
        chance = random.Random(7)
        made: list[int] = []

        async def client(number: int) -> None:
            ask = JobRequest(model=("alpha", "beta")[number % 2], api="/test", client=str(number % 5))
            made.append(number)
            async with runtime.job(ask) as job:
                await submit(job, text=f"request {number}", n_predict=chance.randint(1, 30))
                n_read = chance.choice([0, 1, 5, 1000])
                async for _ in job:
                    n_read -= 1
                    if n_read < 0:
                        break
                    if chance.random() < 0.05:
                        with contextlib.suppress(Conflict):  # it may have ended by itself
                            runtime.registry.cancel(job.id)

        tasks = [asyncio.create_task(client(number)) for number in range(200)]
        while not all(task.done() for task in tasks):
            chance.choice(tasks).cancel()
            await asyncio.sleep(0.01)
        links = [resident.link for resident in runtime.supervisor.residents()]
        await until(lambda: all(link.n_outstanding == 0 for link in links))
        assert {type(task.exception()) for task in tasks if not task.cancelled()} <= {type(None)}
        assert runtime.registry.idle.is_set()
        assert _all_given_back(runtime)
        assert [link.stats.n_running + link.stats.n_queued for link in links if link.stats] == [0] * len(links)
        snapshot = await runtime.telemetry.snapshot()
        assert snapshot.aggregate.requests_total == len(made) >= 190
        assert (snapshot.aggregate.running, snapshot.aggregate.queued, snapshot.aggregate.loading) == (0, 0, 0)
