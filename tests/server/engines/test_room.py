"""Who makes room for whom: limits, memory, eviction, waiting in line, draining."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest

from localrun.errors import CannotFit, DeviceLost, QueueFull, Unavailable
from localrun.models.fit import Gpu
from localrun.server.engines import room
from localrun.server.engines.supervisor import Supervisor
from tests.server.waiting import error_of, until


def _names(supervisor: Supervisor) -> list[str]:
    return [row.model for row in supervisor.loaded()]


async def test_the_least_recently_used_idle_model_makes_room(supervising: Any) -> None:
    async with supervising(max_models=2) as (supervisor, watch):
        (await supervisor.acquire("alpha", None)).release()
        (await supervisor.acquire("beta", None)).release()
        (await supervisor.acquire("alpha", None)).release()
        (await supervisor.acquire("gamma", None)).release()
        assert watch.ended == ["beta"]
        assert sorted(_names(supervisor)) == ["alpha", "gamma"]


async def test_a_busy_model_is_never_evicted_and_the_newcomer_waits_for_it(supervising: Any) -> None:
    async with supervising(max_models=1) as (supervisor, watch):
        busy = await supervisor.acquire("alpha", None)
        waiting = asyncio.create_task(supervisor.acquire("beta", None))
        await until(lambda: "beta" in _names(supervisor))
        await asyncio.sleep(0.05)
        assert watch.ended == []
        beside = await supervisor.acquire("alpha", None)
        assert beside.link is busy.link, "the loaded model goes on serving"
        busy.release()
        beside.release()
        assert (await waiting).model.name == "beta"
        assert watch.ended == ["alpha"]


async def test_newcomers_are_served_in_order(supervising: Any) -> None:
    async with supervising(max_models=1) as (supervisor, watch):
        busy = await supervisor.acquire("alpha", None)
        beta = asyncio.create_task(supervisor.acquire("beta", None))
        await until(lambda: "beta" in _names(supervisor))
        gamma = asyncio.create_task(supervisor.acquire("gamma", None))
        await until(lambda: "gamma" in _names(supervisor))
        busy.release()
        (await beta).release()
        (await gamma).release()
        assert watch.loaded == ["alpha", "beta", "gamma"]


async def test_a_newcomer_does_not_wait_for_ever(supervising: Any) -> None:
    async with supervising(max_models=1, load_timeout_s=8) as (supervisor, _):
        busy = await supervisor.acquire("alpha", None)
        failure = await error_of(supervisor.acquire("beta", None))
        assert isinstance(failure, Unavailable)
        assert "max_models" in failure.message
        assert "alpha" in failure.message
        busy.release()


async def test_a_model_in_steady_use_does_not_starve_a_newcomer(
    supervising: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "DRAIN_AFTER_S", 0.1)
    async with supervising(max_models=1) as (supervisor, watch):

        async def use_alpha(offset_s: float) -> None:
            await asyncio.sleep(offset_s)
            while True:
                lease = await supervisor.acquire("alpha", None)
                await asyncio.sleep(0.05)
                lease.release()

        # Overlapping, so that alpha is hardly ever idle by itself.
        users = [asyncio.create_task(use_alpha(offset_s)) for offset_s in (0, 0.01, 0.02, 0.03)]
        await until(lambda: watch.loaded == ["alpha"])
        lease = await asyncio.wait_for(supervisor.acquire("beta", None), 10)
        assert lease.model.name == "beta"
        lease.release()
        await until(lambda: watch.loaded[:3] == ["alpha", "beta", "alpha"])
        for user in users:
            user.cancel()


async def test_what_cannot_fit_is_refused_with_numbers_and_evicts_nobody(supervising: Any) -> None:
    async with supervising() as (supervisor, watch):
        (await supervisor.acquire("alpha", None)).release()
        watch.available_bytes = 1_000_000
        failure = await error_of(supervisor.acquire("beta", None))
        assert isinstance(failure, CannotFit)
        assert "available" in failure.message
        assert "needs" in failure.message
        assert "alpha" not in watch.ended
        assert _names(supervisor) == ["alpha"]


async def test_memory_that_an_idle_model_holds_is_taken_back(supervising: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrun.server.engines.machine.private_bytes", lambda pid: 0)
    async with supervising() as (supervisor, watch):
        (await supervisor.acquire("alpha", None)).release()
        needed = supervisor.residents()[0].placement.needed_bytes
        # Room for one and a half. What alpha was promised counts, although it has not taken it yet.
        watch.available_bytes = int(needed * 1.5)
        (await supervisor.acquire("beta", None)).release()
        assert watch.ended == ["alpha"]


async def test_an_idle_model_goes_before_the_context_shrinks_and_a_busy_one_does_not(
    supervising: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localrun.server.engines.machine.private_bytes", lambda pid: 0)
    async with supervising(kv_cells=0) as (supervisor, watch):
        alpha = await supervisor.acquire("alpha", None)
        whole = supervisor.residents()[0].placement
        watch.available_bytes = int(whole.needed_bytes * 2)
        (await supervisor.acquire("beta", None)).release()
        cells = {resident.model.name: resident.placement.n_kv_cells for resident in supervisor.residents()}
        assert cells["beta"] < cells["alpha"] == whole.n_kv_cells
        alpha.release()
        await supervisor.unload("beta")
        (await supervisor.acquire("beta", None)).release()
        assert [resident.placement for resident in supervisor.residents()] == [whole]
        assert watch.ended == ["beta", "alpha"]


async def test_requests_for_a_model_that_is_on_its_way_out_are_bounded_too(supervising: Any) -> None:
    async with supervising(max_queue=1, slots=1) as (supervisor, _):
        lease = await supervisor.acquire("alpha", None)
        resident = supervisor.residents()[0]
        resident.is_draining = resident.unload_when_idle = True
        waiting = [asyncio.create_task(supervisor.acquire("alpha", None)) for _ in range(2)]
        await until(lambda: resident.n_behind == 2)
        assert isinstance(await error_of(supervisor.acquire("alpha", None)), QueueFull)
        lease.release()
        first, second = await asyncio.gather(*waiting)
        assert first.link is second.link is not lease.link


# --- GPUs that are lost --------------------------------------------------------------------------------------------

ONE, OTHER = (Gpu(name, 8 << 30, total_bytes=8 << 30) for name in ("one", "other"))


def finds(supervisor: Supervisor, *looks: tuple[Gpu, ...] | DeviceLost, are_used: bool = True) -> None:
    """What llama.cpp finds, look by look, and whether the fake engines, which have none, pass for using it."""
    if are_used:
        supervisor._is_without_its_gpu = lambda *_: False  # type: ignore[method-assign]
    answers = iter(looks)

    async def gpus() -> tuple[Gpu, ...]:
        found = next(answers)
        if isinstance(found, DeviceLost):
            raise found
        return found

    supervisor._room._gpus = gpus


async def test_a_gpu_that_is_lost_is_named_until_it_is_back(supervising: Any, caplog: pytest.LogCaptureFixture) -> None:
    crash = DeviceLost("the process that lists the GPUs was killed by SIGABRT")
    async with supervising() as (supervisor, _):
        finds(supervisor, (ONE, OTHER), (ONE,), (), crash, (), (ONE,))
        (await supervisor.acquire("alpha", None)).release()
        (await supervisor.acquire("beta", None)).release()
        assert "no longer there: other" in caplog.text, "one is left, and is used"
        for words in ("llama.cpp does not find any GPU now", crash.message, "llama.cpp does not find any GPU now"):
            lost = await error_of(supervisor.acquire("gamma", None))
            assert isinstance(lost, DeviceLost)
            assert lost.message.startswith(f"one cannot be used any more: {words}. ")
            assert "num_gpu 0" in lost.message
        (await supervisor.acquire("gamma", None)).release()


async def test_who_wants_no_gpu_asks_for_none(supervising: Any) -> None:
    async with supervising(gpu_layers=0) as (supervisor, _):
        finds(supervisor)
        (await supervisor.acquire("alpha", None)).release()
        assert [resident.placement.n_gpu_layers for resident in supervisor.residents()] == [0]


async def test_with_the_setting_the_cpu_takes_over(supervising: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with supervising(cpu_fallback="on") as (supervisor, _):
        finds(supervisor, (ONE,), (), DeviceLost("gone"))
        (await supervisor.acquire("alpha", None)).release()
        for name in ("beta", "gamma"):
            (await supervisor.acquire(name, None)).release()
            assert f"{name} is loaded for the CPU: one cannot be used any more" in caplog.text
        assert [resident.placement.n_gpu_layers for resident in supervisor.residents()][-2:] == [0, 0]


async def test_a_machine_that_never_had_a_gpu_misses_none(supervising: Any) -> None:
    async with supervising() as (supervisor, _):
        finds(supervisor, (), ())
        (await supervisor.acquire("alpha", None)).release()
        (await supervisor.acquire("beta", None)).release()


async def test_the_loss_of_one_of_two_of_a_name_is_noticed(supervising: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with supervising() as (supervisor, _):
        finds(supervisor, (ONE, ONE), (ONE,))
        (await supervisor.acquire("alpha", None)).release()
        (await supervisor.acquire("beta", None)).release()
        assert "no longer there: one" in caplog.text


@pytest.mark.parametrize("fallback", ["off", "on"])
async def test_a_gpu_that_is_lost_on_the_way_is_not_silently_done_without(supervising: Any, fallback: str) -> None:
    """It was listed, and when the engine came there it saw none."""
    async with supervising(cpu_fallback=fallback) as (supervisor, _):
        finds(supervisor, (ONE,), (), are_used=False)
        if fallback == "off":
            assert isinstance(await error_of(supervisor.acquire("alpha", None)), DeviceLost)
            return
        (await supervisor.acquire("alpha", None)).release()
        [resident] = supervisor.residents()
        assert resident.placement.n_gpu_layers == 0, "room was taken where it runs"


async def test_where_no_gpu_was_ever_seen_a_list_that_fails_is_no_loss(
    supervising: Any, caplog: pytest.LogCaptureFixture
) -> None:
    crash = DeviceLost("the process that lists the GPUs was killed by SIGABRT")
    async with supervising() as (supervisor, _):
        finds(supervisor, crash, crash)
        for name in ("alpha", "beta"):
            (await supervisor.acquire(name, None)).release()
            assert f"{name} is loaded for the CPU: the GPUs cannot be used any more: {crash.message}" in caplog.text


# --- loads that everybody left -----------------------------------------------------------------------------------


async def test_a_load_that_everybody_left_makes_room_for_another_model(supervising: Any) -> None:
    async with supervising(script="hang-alpha", max_models=1) as (supervisor, watch):
        leaving = asyncio.create_task(supervisor.acquire("alpha", None))
        await until(lambda: supervisor.residents() != [] and supervisor.residents()[0].link.pid is not None)
        pid = supervisor.residents()[0].link.pid
        leaving.cancel()
        (await supervisor.acquire("beta", None)).release()
        assert (watch.loaded, watch.ended) == (["beta"], ["alpha"])
        assert not psutil.pid_exists(pid)


async def test_a_model_that_waits_for_room_evicts_nobody_once_everybody_left_it(supervising: Any) -> None:
    async with supervising(max_models=1) as (supervisor, watch):
        busy = await supervisor.acquire("alpha", None)
        leaving = asyncio.create_task(supervisor.acquire("beta", None))
        await until(lambda: "beta" in _names(supervisor))
        leaving.cancel()
        await until(lambda: _names(supervisor) == ["alpha"])
        busy.release()
        assert (await supervisor.acquire("alpha", None)).link is busy.link
        assert watch.loaded == ["alpha"]


async def test_a_load_that_is_stopped_ends_when_nobody_waits_for_it(supervising: Any) -> None:
    async with supervising(script="hang-alpha") as (supervisor, watch):
        leaving = asyncio.create_task(supervisor.acquire("alpha", None))
        await until(lambda: supervisor.residents() != [] and supervisor.residents()[0].link.pid is not None)
        assert await supervisor.unload("alpha")
        assert _names(supervisor) == ["alpha"], "somebody waits for it"
        leaving.cancel()
        await until(lambda: _names(supervisor) == [])
        assert (watch.loaded, watch.ended) == ([], ["alpha"])
