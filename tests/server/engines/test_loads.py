"""Which engine a request's load settings are given: one that is there, a larger one, another one beside it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from localrun.config import LoadSettings, ModelTable, Settings
from localrun.errors import BadRequest, CannotFit
from localrun.models.storage.store import Store
from localrun.server.engines import loads, room
from localrun.server.engines.loads import Loads
from localrun.server.engines.resident import Use
from localrun.server.engines.supervisor import Supervisor
from localrun.server.jobs.job import Job, JobRequest
from tests.server.waiting import error_of, until

SMALL = {"kv_cells": 1024, "slots": 2}


async def lease(supervisor: Supervisor, name: str = "alpha", **load: Any) -> Any:
    asked = LoadSettings(**load)
    return supervisor.lend(name, None, Use.TEXT, asked) or await supervisor.acquire(name, None, Use.TEXT, asked)


async def pid(supervisor: Supervisor, name: str = "alpha", **load: Any) -> int:
    """The engine's that a request is given, which it gives back at once."""
    lent = await lease(supervisor, name, **load)
    lent.release()
    return lent.link.pid


# --- room ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ctx", [1, 512, 1024])
async def test_what_the_loaded_engine_has_room_for_loads_nothing(supervising: Any, num_ctx: int) -> None:
    async with supervising(**SMALL) as (supervisor, watch):
        assert await pid(supervisor) == await pid(supervisor, num_ctx=num_ctx)
        assert watch.loaded == ["alpha"]


async def test_a_larger_engine_takes_the_place_of_a_smaller_one_and_serves_all(supervising: Any) -> None:
    async with supervising(**SMALL) as (supervisor, watch):
        small = await pid(supervisor)
        large = await pid(supervisor, num_ctx=2000)
        assert large != small
        await until(lambda: watch.ended == ["alpha"])
        assert await pid(supervisor) == large
        row = supervisor.loaded()[0]
        assert row.n_ctx >= 2000
        assert row.load == {"num_ctx": 2000}


async def test_two_clients_with_different_contexts_do_not_take_turns_loading(supervising: Any) -> None:
    async with supervising(**SMALL) as (supervisor, watch):
        for num_ctx in (None, 3000, 2000, 1024, 3000, None, 2500):
            await pid(supervisor, num_ctx=num_ctx)
        assert watch.loaded == ["alpha", "alpha"]


async def test_a_client_that_asks_for_a_little_more_each_time_has_it_loaded_seldom(supervising: Any) -> None:
    async with supervising(kv_cells=256, slots=1) as (supervisor, watch):
        for num_ctx in range(100, 4_000, 100):
            await pid(supervisor, num_ctx=num_ctx)
        assert len(watch.loaded) == 5, "256, 512, 1024, 2048, 4096"


async def test_requests_on_the_smaller_engine_end_in_peace(supervising: Any) -> None:
    async with supervising(**SMALL) as (supervisor, watch):
        running = await lease(supervisor)
        large = await pid(supervisor, num_ctx=2000)
        assert running.link.error is None
        assert watch.ended == []
        assert await pid(supervisor) == large, "nothing new begins on it"
        running.release()
        await until(lambda: watch.ended == ["alpha"])


async def test_the_smaller_engine_serves_until_the_larger_one_is_there(supervising: Any) -> None:
    async with supervising(**SMALL) as (supervisor, _):
        small = await pid(supervisor)
        waiting = asyncio.create_task(pid(supervisor, num_ctx=2000))
        await until(lambda: len(supervisor.residents()) == 2)
        assert await pid(supervisor) == small
        assert await waiting != small


async def test_where_there_is_no_room_for_both_the_smaller_one_is_drained(
    supervising: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "DRAIN_AFTER_S", 0.1)
    monkeypatch.setattr("localrun.server.engines.machine.private_bytes", lambda pid: 0)
    async with supervising(**SMALL) as (supervisor, watch):
        running = await lease(supervisor)
        watch.available_bytes = int(supervisor.residents()[0].placement.needed_bytes * 1.9)
        waiting = asyncio.create_task(pid(supervisor, num_ctx=2000))
        await until(lambda: supervisor.residents()[0].is_draining)
        default = asyncio.create_task(pid(supervisor))
        await asyncio.sleep(0.05)
        assert watch.ended == []
        running.release()
        assert await waiting == await default
        assert watch.loaded == ["alpha", "alpha"]


async def test_a_context_that_does_not_fit_is_refused_by_name_and_harms_nobody(supervising: Any) -> None:
    async with supervising(kv_cells=0) as (supervisor, watch):
        small = await pid(supervisor, rope_frequency_scale=0.01)
        watch.available_bytes = supervisor.residents()[0].placement.needed_bytes * 2
        failure = await error_of(pid(supervisor, num_ctx=400_000, rope_frequency_scale=0.01))
        assert isinstance(failure, CannotFit)
        assert "num_ctx than 400000" in failure.message
        assert "would fit" in failure.message
        assert await pid(supervisor, rope_frequency_scale=0.01) == small


async def test_what_others_asked_for_fails_nobody_else(supervising: Any) -> None:
    async with supervising(kv_cells=0) as (supervisor, watch):
        watch.available_bytes = 200_000_000
        asked = {"num_ctx": 400_000, "rope_frequency_scale": 0.01}
        failing = asyncio.create_task(error_of(lease(supervisor, **asked)))
        joining = asyncio.create_task(lease(supervisor, rope_frequency_scale=0.01))
        assert isinstance(await failing, CannotFit)
        assert (await joining).link.ready.n_ctx < 400_000


async def test_a_context_beyond_the_trained_one_is_that_unless_positions_are_scaled(supervising: Any) -> None:
    async with supervising(kv_cells=4096, slots=1) as (supervisor, watch):
        assert await pid(supervisor) == await pid(supervisor, num_ctx=1_000_000)
        assert watch.loaded == ["alpha"]
        scaled = await lease(supervisor, num_ctx=1_000_000, rope_frequency_scale=0.5)
        assert scaled.link.ready.n_ctx == 8192


async def test_a_request_goes_on_on_an_engine_as_large_as_the_one_that_died(running: Any, submit: Any) -> None:
    async with running(**SMALL, step_ms=5) as runtime:
        async with runtime.job(JobRequest(model="alpha", api="/test", load=LoadSettings(num_ctx=3000))):
            pass
        job: Job
        async with runtime.job(JobRequest(model="alpha", api="/test")) as job:
            await submit(job, n_predict=60)
            n_tokens = 0
            async for delta in job:
                if n_tokens == 0:
                    os.kill(job.link.pid, signal.SIGKILL)
                n_tokens += len(delta.tokens)
        assert n_tokens == 60
        (row,) = runtime.supervisor.loaded()
        assert row.load == {"num_ctx": 3000}


# --- settings that exclude each other -------------------------------------------------------------------------------


async def test_types_that_exclude_each_other_have_an_engine_each(supervising: Any) -> None:
    async with supervising(**SMALL) as (supervisor, watch):
        pids = [await pid(supervisor, kv_type=kv_type) for kv_type in ("f16", "q8_0", "f16", "q8_0", "auto")]
        assert len(set(pids)) == 2
        assert watch.loaded == ["alpha", "alpha"]
        assert [row.kv_type for row in supervisor.loaded()] == ["f16", "q8_0"]
        assert watch.ended == []


async def test_who_asks_for_no_type_takes_what_there_is(supervising: Any) -> None:
    async with supervising(**SMALL) as (supervisor, _):
        assert await pid(supervisor, kv_type="q8_0") == await pid(supervisor)


async def test_who_names_what_was_chosen_anyway_loads_nothing(supervising: Any) -> None:
    async with supervising(**SMALL) as (supervisor, _):
        assert await pid(supervisor) == await pid(supervisor, kv_type="f16")


async def test_a_larger_engine_keeps_what_the_smaller_one_was_asked_for(supervising: Any) -> None:
    async with supervising(**SMALL) as (supervisor, watch):
        await pid(supervisor, kv_type="q8_0")
        large = await pid(supervisor, num_ctx=2000)
        assert await pid(supervisor, kv_type="q8_0") == large
        assert watch.loaded == ["alpha", "alpha"]


async def test_another_rope_is_another_engine_and_nobody_else_s(supervising: Any) -> None:
    async with supervising(**SMALL) as (supervisor, _):
        other = await pid(supervisor, rope_frequency_base=1_000_000.0)
        own = await pid(supervisor)
        assert own != other
        assert await pid(supervisor, rope_frequency_base=1_000_000.0) == other
        assert await pid(supervisor, rope_frequency_base=10_000.0, rope_frequency_scale=1.0) == own, "as in its file"


async def test_layers_for_a_gpu_count_where_there_may_be_one(supervising: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervising(**SMALL) as (supervisor, _):
        assert await pid(supervisor) == await pid(supervisor, gpu_layers=99)
    monkeypatch.setattr(loads, "has_gpu_library", lambda: True)
    async with supervising(**SMALL) as (supervisor, _):
        plain = await pid(supervisor)
        assert await pid(supervisor, gpu_layers=0) == plain, "it has none"
        assert await pid(supervisor, gpu_layers=2) != plain


async def test_all_engines_of_a_model_are_unloaded(supervising: Any) -> None:
    async with supervising(**SMALL) as (supervisor, watch):
        await pid(supervisor, kv_type="f16")
        await pid(supervisor, kv_type="q8_0")
        assert await supervisor.unload("alpha")
        assert watch.ended == ["alpha", "alpha"]


# --- where settings come from -------------------------------------------------------------------------------------


def tables(**by_pattern: LoadSettings) -> tuple[ModelTable, ...]:
    return tuple(itertools.starmap(ModelTable, by_pattern.items()))


async def test_a_table_says_how_its_models_are_loaded(supervising: Any) -> None:
    models = tables(alpha=LoadSettings(slots=3, kv_type="q8_0", kv_cells=2048))
    async with supervising(**SMALL, models=models) as (supervisor, _):
        await pid(supervisor, "alpha")
        await pid(supervisor, "beta")
        alpha, beta = supervisor.loaded()
        assert (alpha.slots, alpha.kv_type, alpha.kv_cells >= 2048) == (3, "q8_0", True)
        assert (beta.slots, beta.kv_type) == (2, "f16")
        assert alpha.load == {"slots": 3, "kv_cells": 2048, "kv_type": "q8_0"}


async def test_a_request_comes_before_the_table(supervising: Any) -> None:
    models = tables(alpha=LoadSettings(kv_type="q8_0"))
    async with supervising(**SMALL, models=models) as (supervisor, _):
        await pid(supervisor, kv_type="q4_0")
        assert supervisor.loaded()[0].kv_type == "q4_0"


async def test_a_type_that_the_model_cannot_have_is_refused(supervising: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrun.models.fit.is_quantizable", lambda header: False)
    async with supervising(**SMALL) as (supervisor, _):
        failure = await error_of(pid(supervisor, kv_type="q8_0"))
        assert isinstance(failure, BadRequest)
        assert "use f16" in failure.message
        assert supervisor.residents() == []


def test_what_changes_nothing_is_not_asked_for(models_dir: Path) -> None:
    model = Store(models_dir).resolve("alpha")
    asked = Loads(Settings()).asked(model, LoadSettings(gpu_layers=-1, rope_frequency_base=0.0, num_ctx=0))
    assert asked == LoadSettings()
