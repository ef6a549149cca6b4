"""The request table."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from localrun import wire
from localrun.errors import Conflict, NotFound
from localrun.server.jobs import registry as registry_module
from localrun.server.jobs.generation import Generation, new_id
from localrun.server.jobs.job import Job, JobRequest
from localrun.server.jobs.registry import MAX_ENDED
from localrun.snapshot import RequestState
from tests.server.waiting import until


async def test_rows_show_who_runs_and_who_waits_in_which_place(running: Any, submit: Any) -> None:
    async with running(slots=1, step_ms=2) as runtime:
        jobs: list[Job] = []

        async def client(number: int) -> None:
            ask = JobRequest(model="alpha", api="/api/chat", client=f"client {number}", lane=wire.Lane.INTERACTIVE)
            async with runtime.job(ask) as job:
                jobs.append(job)
                await submit(job, text=f"question {number}", n_predict=100_000)
                async for _ in job:
                    pass

        tasks = []
        for number in range(3):
            tasks.append(asyncio.create_task(client(number)))
            await until(lambda: len(jobs) == len(tasks) and jobs[-1].record.engine_request_id is not None)
        await until(lambda: jobs[0].record.n_output > 2 and runtime.registry.rows()[2].queue_position == 2)
        first, second, third = runtime.registry.rows()
        assert (first.state, first.client, first.lane, first.slot) == (
            RequestState.DECODE,
            "client 0",
            "interactive",
            0,
        )
        assert first.prompt_tokens == len("question 0")
        assert first.tokens_per_s is not None
        assert (second.state, second.queue_position, second.prompt_tokens) == (RequestState.QUEUED, 1, None)
        assert (third.state, third.queue_position, third.slot) == (RequestState.QUEUED, 2, None)
        assert runtime.registry.count(RequestState.QUEUED) == 2
        runtime.registry.cancel(jobs[1].id)
        await until(lambda: runtime.registry.row(jobs[2].id).queue_position == 1)
        assert runtime.registry.row(jobs[1].id).state is RequestState.CANCELLED
        for task in tasks:
            task.cancel()


async def test_a_loading_request_is_in_the_table(running: Any) -> None:
    async with running() as runtime:
        job = runtime.job(JobRequest(model="alpha", api="/api/chat"))
        assert runtime.registry.row(job.id).state is RequestState.LOADING
        async with job:
            assert runtime.registry.row(job.id).state is RequestState.QUEUED


async def test_it_is_quiet_once_nobody_waits(running: Any, submit: Any) -> None:
    async with running() as runtime:
        async with runtime.job(JobRequest(model="alpha", api="/api/chat")) as job:
            assert runtime.registry.quiet_s() == 0.0
            await submit(job, n_predict=2)
            assert [delta async for delta in job]
        await until(lambda: runtime.registry.quiet_s() > 0.0)
        async with runtime.job(JobRequest(model="alpha", api="/v1/batches", lane=wire.Lane.BATCH)):
            assert runtime.registry.quiet_s() > 0.0


async def test_cancel_tells_unknown_from_ended(running: Any, generate: Any) -> None:
    async with running() as runtime:
        await generate(runtime)
        ended = runtime.registry.rows()[0].id
        with pytest.raises(Conflict, match="ended already"):
            runtime.registry.cancel(ended)
        with pytest.raises(NotFound, match="not known"):
            runtime.registry.cancel("req_nothing")


async def test_ended_requests_are_kept_for_a_while_and_not_all_of_them(
    running: Any, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as runtime:
        for _ in range(MAX_ENDED + 5):
            await generate(runtime, n_predict=1)
        rows = runtime.registry.rows()
        assert len(rows) == MAX_ENDED
        assert [row.age_s >= 0 for row in rows] == [True] * MAX_ENDED
        monkeypatch.setattr(registry_module, "KEEP_ENDED_S", -1.0)
        assert runtime.registry.rows() == []


async def test_one_keys_ended_requests_push_out_nobody_elses(running: Any, generate: Any) -> None:
    async with running() as runtime:
        await generate(runtime, n_predict=1, key="quiet")
        for _ in range(MAX_ENDED + 5):
            await generate(runtime, n_predict=1, key="busy")
        rows = runtime.registry.rows()
        assert len(rows) == MAX_ENDED
        assert [row.key for row in rows].count("quiet") == 1


def test_ids_are_unique() -> None:
    assert len({new_id() for _ in range(1000)}) == 1000


async def test_a_thousand_jobs_at_once_with_random_cancels_leave_nothing_behind(running: Any, submit: Any) -> None:
    chance = random.Random(5)
    async with running(slots=8, max_queue=1000, ram_cache_bytes=0) as runtime:
        ends: list[str] = []

        async def client(number: int) -> None:
            lane = chance.choice(list(wire.Lane))
            ask = JobRequest(model="alpha", api="/api/chat", client=f"client {number % 9}", lane=lane)
            async with runtime.job(ask) as job:
                await submit(job, text=f"{number} asks", n_predict=4)
                if chance.random() < 0.3:
                    job.request_cancel()
                finals = [delta.finish async for delta in job if delta.finish is not None]
                assert len(finals) == 1
                ends.append(finals[0])

        await asyncio.gather(*(client(number) for number in range(1000)))
        assert len(ends) == 1000
        assert 0 < ends.count(wire.Finish.CANCELLED) < 500
        assert runtime.registry.idle.is_set()
        (resident,) = runtime.supervisor.residents()
        assert (resident.n_leases, resident.link.n_outstanding) == (0, 0)
        await until(lambda: resident.link.stats is not None and resident.link.stats.n_queued == 0)
        assert resident.link.stats.n_running == 0


def _record() -> Generation:
    return Generation("req_1", "/api/chat", "editor", wire.Lane.INTERACTIVE, "asked-name", 100.0)


def _delta(n_output: int, n_tokens: int = 1, phase: wire.Phase = wire.Phase.DECODE) -> wire.Delta:
    return wire.Delta(1, phase, n_computed=10 + n_output, n_output=n_output, tokens=[7] * n_tokens)


def test_a_new_request_waits_for_its_model_and_invents_no_numbers() -> None:
    row = _record().row(102.0)
    assert row.state is RequestState.LOADING
    assert row.model == "asked-name"
    assert row.age_s == 2.0
    assert (row.prompt_tokens, row.cached_tokens, row.ttft_s, row.tokens_per_s, row.itl_p50_s) == (None,) * 5


def test_the_way_through_the_states() -> None:
    record = _record()
    record.loaded("tiny", "tiny")
    assert record.row(101.0, queue_position=2).state is RequestState.QUEUED
    assert record.row(101.0, queue_position=2).queue_position == 2
    assert record.row(101.0, queue_position=2, predicted_wait_s=1.5).predicted_wait_s == 1.5
    record.started(wire.Started(id=1, slot=3, n_prompt=10, n_cached=4))
    row = record.row(101.0)
    assert (row.state, row.slot, row.prompt_tokens, row.cached_tokens, row.computed_tokens) == (
        RequestState.PREFILL, 3, 10, 4, 4,
    )  # fmt: skip
    record.progress(_delta(1), 103.0)
    assert record.row(103.0).state is RequestState.DECODE
    record.progress(wire.Delta(1, wire.Phase.QUEUED, n_computed=0, n_output=1), 104.0)
    assert (record.row(104.0).state, record.row(104.0).slot) == (RequestState.QUEUED, None)


def test_times_and_rates() -> None:
    record = _record()
    record.loaded("tiny", "tiny")
    record.started(wire.Started(id=1, slot=0, n_prompt=10, n_cached=0))
    assert record.progress(_delta(1), 103.0) is None
    assert record.row(103.0).tokens_per_s is None
    for step in range(1, 11):
        assert record.progress(_delta(1 + step), 103.0 + step * 0.1) == pytest.approx(0.1)
    row = record.row(104.0)
    assert row.ttft_s == 3.0
    assert row.output_tokens == 11
    assert row.tokens_per_s == pytest.approx(10, rel=0.05)
    assert row.tokens_per_s_avg == pytest.approx(10)
    assert row.itl_p50_s == pytest.approx(0.1, rel=0.04)


def test_drafts_of_all_engines_add_up() -> None:
    record = _record()
    record.loaded("tiny", "tiny")
    record.progress(wire.Delta(1, wire.Phase.DECODE, 11, 1, tokens=[7], n_drafted=6, n_accepted=4), 101.0)
    assert (record.row(101.0).drafted_tokens, record.row(101.0).accepted_tokens) == (6, 4)
    assert (record.row(101.0).drafts, record.row(101.0).speedup) == ([], None)
    record.resume()
    assert record.row(102.0).drafted_tokens == 6
    record.progress(wire.Delta(1, wire.Phase.DECODE, 12, 2, tokens=[7], n_drafted=3, n_accepted=0), 103.0)
    assert (record.row(103.0).drafted_tokens, record.row(103.0).accepted_tokens) == (9, 4)
    counts = wire.DraftCounts(wire.DraftSource.MTP, n_drafts=2, n_drafted=5, n_accepted=1, seconds=0.5)
    record.usage = wire.Usage(10, 6, 3, 0.1, 0.2, 0.0, drafts=(counts,), speedup=1.5)
    record.end(RequestState.DONE, 105.0, finish_reason="stop")
    row = record.row(200.0)
    assert (row.drafted_tokens, row.accepted_tokens, row.speedup) == (11, 5, 1.5)
    assert [(one.source, one.drafted_tokens) for one in row.drafts] == [("mtp", 5)]


def test_an_end_that_says_nothing_of_drafts_takes_none_back() -> None:
    record = _record()
    record.progress(wire.Delta(1, wire.Phase.DECODE, 11, 1, tokens=[7], n_drafted=6, n_accepted=4), 101.0)
    record.progress(wire.Delta(1, wire.Phase.DONE, 11, 1, finish=wire.Finish.CANCELLED), 102.0)
    record.usage = wire.Usage(10, 6, 1, 0.1, 0.2, 0.0)
    record.end(RequestState.CANCELLED, 102.0)
    row = record.row(103.0)
    assert (row.drafted_tokens, row.accepted_tokens, row.drafts, row.speedup) == (6, 4, [], None)


def test_several_tokens_of_one_step_share_its_time() -> None:
    record = _record()
    record.progress(_delta(1), 101.0)
    assert record.progress(_delta(5, n_tokens=4), 102.0) == pytest.approx(0.25)


def test_the_end_takes_the_engines_counts_and_stops_the_clock() -> None:
    record = _record()
    record.loaded("tiny", "tiny")
    record.progress(_delta(1), 101.0)
    record.usage = wire.Usage(n_prompt=10, n_cached=6, n_output=1, queued_s=0.1, prefill_s=0.2, decode_s=0.0)
    record.end(RequestState.DONE, 105.0, finish_reason="stop")
    row = record.row(200.0)
    assert (row.state, row.finish_reason, row.age_s) == (RequestState.DONE, "stop", 5.0)
    assert (row.prompt_tokens, row.cached_tokens, row.tokens_per_s) == (10, 6, None)
