"""Loading on demand, sharing, unloading, evicting and starting again, on fake engine processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from localrun.errors import BadModelFile, EngineDied, ModelNotFound, QueueFull, Unavailable
from localrun.models import creation, naming
from localrun.models.creation import Changes
from localrun.models.storage import manifest
from localrun.models.storage.store import Store
from localrun.server.engines import supervisor as supervisor_module
from localrun.server.engines.supervisor import Supervisor
from tests.lora_file import write_lora
from tests.server.waiting import error_of, until

SCRIPT = str(Path(__file__).parents[1] / "scripted_engine.py")


def _names(supervisor: Supervisor) -> list[str]:
    return [row.model for row in supervisor.loaded()]


# --- loading -----------------------------------------------------------------------------------------------------


async def test_ten_concurrent_waiters_make_one_load(supervising: Any) -> None:
    async with supervising() as (supervisor, watch):
        leases = await asyncio.gather(*(supervisor.acquire("alpha", None) for _ in range(10)))
        assert watch.loaded == ["alpha"]
        assert len({lease.link.pid for lease in leases}) == 1
        assert all(lease.waited_s > 0 for lease in leases)
        again = await supervisor.acquire("alpha", None)
        assert again.waited_s == 0.0


async def test_a_failing_load_fails_all_its_waiters_with_the_same_error(supervising: Any) -> None:
    async with supervising(script="refuse") as (supervisor, watch):
        failures = await asyncio.gather(*(error_of(supervisor.acquire("alpha", None)) for _ in range(5)))
        assert {type(failure) for failure in failures} == {BadModelFile}
        assert len({failure.message for failure in failures}) == 1
        assert watch.loaded == []
        assert supervisor.residents() == []


async def test_a_waiter_that_leaves_does_not_end_the_load_for_others(supervising: Any) -> None:
    async with supervising() as (supervisor, watch):
        leaving = asyncio.create_task(supervisor.acquire("alpha", None))
        staying = asyncio.create_task(supervisor.acquire("alpha", None))
        await until(lambda: _names(supervisor) == ["alpha"])
        leaving.cancel()
        lease = await staying
        assert lease.model.name == "alpha"
        assert watch.loaded == ["alpha"]


async def test_a_load_that_everybody_left_finishes_and_idles(supervising: Any) -> None:
    async with supervising(keep_alive_s=100) as (supervisor, watch):
        leaving = asyncio.create_task(supervisor.acquire("alpha", None))
        await until(lambda: _names(supervisor) == ["alpha"])
        leaving.cancel()
        await until(lambda: watch.loaded == ["alpha"])
        row = supervisor.loaded()[0]
        assert row.state == "ready"
        assert row.expires_in_s is not None
        assert row.expires_in_s <= 100


async def test_a_path_and_a_name_are_one_engine(supervising: Any, models_dir: Path) -> None:
    async with supervising() as (supervisor, watch):
        (models_dir.parent / "link.gguf").symlink_to(models_dir / "alpha.gguf")
        leases = [
            await supervisor.acquire(name, None)
            for name in ("alpha", str(models_dir / "alpha.gguf"), str(models_dir.parent / "link.gguf"))
        ]
        assert len({lease.link.pid for lease in leases}) == 1
        assert watch.loaded == ["alpha"]


async def test_an_unknown_model_is_not_found_and_loads_nothing(supervising: Any) -> None:
    async with supervising() as (supervisor, _):
        assert isinstance(await error_of(supervisor.acquire("nowhere", None)), ModelNotFound)
        assert supervisor.residents() == []


async def test_too_many_waiters_for_one_load_are_refused(supervising: Any) -> None:
    async with supervising(script="hang", max_queue=1, slots=1) as (supervisor, _):
        waiting = [asyncio.create_task(supervisor.acquire("alpha", None)) for _ in range(2)]
        await until(lambda: bool(supervisor.residents()) and supervisor.residents()[0].n_waiting == 2)
        refused = await error_of(supervisor.acquire("alpha", None))
        assert isinstance(refused, QueueFull)
        resident = supervisor.residents()[0]
        began_s = resident.began_at_s
        assert refused.retry_after_s >= 0
        assert resident.load_left_s(began_s + 2.0, None) == pytest.approx(2.0), "as long again"
        assert resident.load_left_s(began_s + 2.0, 5.0) == pytest.approx(3.0), "as long as the last time"
        assert resident.load_left_s(began_s + 7.0, 5.0) == pytest.approx(7.0), "the last time says nothing any more"
        for task in waiting:
            task.cancel()


async def test_stopping_gives_up_loads_in_progress(supervising: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrun.server.engines.link.TERMINATE_GRACE_S", 0.1)
    async with supervising(script="hang") as (supervisor, _):
        waiting = asyncio.create_task(error_of(supervisor.acquire("alpha", None)))
        await until(lambda: bool(supervisor.residents()) and supervisor.residents()[0].link.pid is not None)
        pid = supervisor.residents()[0].link.pid
        await supervisor.stop()
        assert isinstance(await waiting, Unavailable)
        assert not psutil.pid_exists(pid)
        assert isinstance(await error_of(supervisor.acquire("alpha", None)), Unavailable)


async def test_a_loaded_model_is_lent_while_no_thread_is_free(supervising: Any, models_dir: Path) -> None:
    async with supervising() as (supervisor, watch):
        (await supervisor.acquire("alpha", None)).release()
        is_blocked, is_over = threading.Event(), threading.Event()
        pool = ThreadPoolExecutor(max_workers=1)
        asyncio.get_running_loop().set_default_executor(pool)
        blocking = asyncio.create_task(asyncio.to_thread(lambda: (is_blocked.set(), is_over.wait(10))))
        await until(is_blocked.is_set)
        lease = await supervisor.acquire("alpha", None)
        assert not blocking.done()
        lease.release()
        is_over.set()
        await blocking
        assert watch.loaded == ["alpha"]


@pytest.mark.parametrize("change", ["replaced", "removed", "named by a manifest"])
async def test_a_name_that_means_something_else_is_looked_up_again(
    supervising: Any, models_dir: Path, change: str
) -> None:
    async with supervising() as (supervisor, _):
        first = await supervisor.acquire("alpha", None)
        first.release()
        path = models_dir / "alpha.gguf"
        if change == "replaced":
            shutil.copy(path, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
            assert (await supervisor.acquire("alpha", None)).link.pid != first.link.pid
        elif change == "removed":
            path.unlink()
            assert isinstance(await error_of(supervisor.acquire("alpha", None)), ModelNotFound)
        else:
            beta = naming.described(Store(models_dir).resolve("beta"))
            manifest.write(models_dir, "alpha", msgspec.structs.replace(beta, name="alpha"))
            assert (await supervisor.acquire("alpha", None)).model.path == models_dir / "beta.gguf"


# --- unloading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_at_once", [True, False])
async def test_a_request_after_an_unload_of_a_busy_model_keeps_it_as_long_as_it_says(
    supervising: Any, is_at_once: bool
) -> None:
    async with supervising() as (supervisor, watch):

        async def lease() -> Any:
            if is_at_once:
                return supervisor.lend("alpha", 3600.0)
            return await supervisor.acquire("alpha", 3600.0)

        before = await supervisor.acquire("alpha", None)
        assert await supervisor.unload("alpha")
        after = await lease()
        after.release()
        before_ended = await lease()
        before.release()
        before_ended.release()
        await asyncio.sleep(0)
        assert [row.state for row in supervisor.loaded()] == ["ready"]
        assert watch.ended == []
        assert await supervisor.unload("alpha")
        assert watch.ended == ["alpha"]


async def test_keep_alive_zero_unloads_after_the_last_job(supervising: Any) -> None:
    async with supervising() as (supervisor, watch):
        first = await supervisor.acquire("alpha", 0)
        second = await supervisor.acquire("alpha", 0)
        first.release()
        await asyncio.sleep(0)
        assert _names(supervisor) == ["alpha"]
        pid = second.link.pid
        second.release()
        await until(lambda: watch.ended == ["alpha"])
        assert not psutil.pid_exists(pid)


async def test_keep_alive_counts_down_from_the_last_job_and_for_ever_is_for_ever(supervising: Any) -> None:
    async with supervising(keep_alive_s=300) as (supervisor, watch):
        (await supervisor.acquire("alpha", 0.05)).release()
        (await supervisor.acquire("beta", -1)).release()
        rows = {row.model: row for row in supervisor.loaded()}
        assert rows["beta"].expires_in_s is None
        await until(lambda: watch.ended == ["alpha"])
        assert _names(supervisor) == ["beta"]


async def test_a_job_that_asks_for_no_keep_alive_leaves_it_as_it_is_until_the_model_is_loaded_again(supervising: Any):
    async with supervising(keep_alive_s=300) as (supervisor, watch):
        (await supervisor.acquire("alpha", -1)).release()
        (await supervisor.acquire("alpha", None)).release()
        lease = supervisor.lend("alpha", None)
        assert lease is not None
        lease.release()
        assert supervisor.loaded()[0].expires_in_s is None
        (await supervisor.acquire("alpha", 0)).release()
        await until(lambda: watch.ended == ["alpha"])
        (await supervisor.acquire("alpha", None)).release()
        assert supervisor.loaded()[0].expires_in_s == pytest.approx(300, abs=60)


async def test_a_new_job_stops_the_countdown(supervising: Any) -> None:
    async with supervising() as (supervisor, _):
        (await supervisor.acquire("alpha", 0.2)).release()
        lease = await supervisor.acquire("alpha", 0.2)
        await asyncio.sleep(0.4)
        assert _names(supervisor) == ["alpha"]
        lease.release()


async def test_releasing_twice_counts_once(supervising: Any) -> None:
    async with supervising() as (supervisor, _):
        lease, other = await supervisor.acquire("alpha", 0), await supervisor.acquire("alpha", 0)
        lease.release()
        lease.release()
        await asyncio.sleep(0.02)
        assert _names(supervisor) == ["alpha"]
        other.release()


async def test_unload_is_at_once_when_idle_and_after_the_jobs_when_busy(supervising: Any) -> None:
    async with supervising() as (supervisor, watch):
        assert await supervisor.unload("alpha") is False
        (await supervisor.acquire("alpha", None)).release()
        assert await supervisor.unload("alpha") is True
        assert watch.ended == ["alpha"]
        busy = await supervisor.acquire("beta", None)
        assert await supervisor.unload("beta") is True
        assert _names(supervisor) == ["beta"]
        busy.release()
        await until(lambda: watch.ended == ["alpha", "beta"])
        with pytest.raises(ModelNotFound):
            await supervisor.unload("nowhere")


async def test_a_deleted_file_can_still_be_unloaded(supervising: Any, models_dir: Path) -> None:
    async with supervising() as (supervisor, watch):
        (await supervisor.acquire("alpha", None)).release()
        (models_dir / "alpha.gguf").unlink()
        assert await supervisor.unload("alpha") is True
        assert watch.ended == ["alpha"]


async def test_a_replaced_file_is_loaded_anew_when_idle(supervising: Any, models_dir: Path) -> None:
    async with supervising() as (supervisor, watch):
        old = await supervisor.acquire("alpha", None)
        old_pid = old.link.pid
        shutil.copy(models_dir / "beta.gguf", models_dir / "new.gguf")
        os.replace(models_dir / "new.gguf", models_dir / "alpha.gguf")
        beside = await supervisor.acquire("alpha", None)
        assert beside.link.pid == old_pid, "a busy engine is not ended"
        old.release()
        beside.release()
        new = await supervisor.acquire("alpha", None)
        assert new.link.pid != old_pid
        assert watch.loaded == ["alpha", "alpha"]


# --- deaths ------------------------------------------------------------------------------------------------------


async def test_a_dead_engine_is_replaced_by_the_next_request(supervising: Any) -> None:
    async with supervising() as (supervisor, watch):
        lease = await supervisor.acquire("alpha", None)
        other = await supervisor.acquire("beta", None)
        os.kill(lease.link.pid, signal.SIGKILL)
        await until(lambda: watch.ended == ["alpha"])
        lease.release()
        again = await supervisor.acquire("alpha", None)
        assert again.link is not lease.link
        assert again.link.error is None
        assert other.link.error is None


async def test_three_early_deaths_stop_the_restarts_for_a_while(supervising: Any) -> None:
    async with supervising(script="abort") as (supervisor, watch):
        for _ in range(3):
            failure = await error_of(supervisor.acquire("alpha", None))
            assert isinstance(failure, BadModelFile)
            assert "SIGABRT" in failure.message
        refused = await error_of(supervisor.acquire("alpha", None))
        assert isinstance(refused, BadModelFile)
        assert "not tried again for" in refused.message
        assert "SIGABRT" in refused.message
        assert len(watch.ended) == 3, "the refusal starts no process"


async def test_the_door_opens_again_after_its_time(supervising: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrun.server.engines.faults.OPEN_S", 0.2)
    async with supervising(script="exit") as (supervisor, watch):
        for _ in range(3):
            await error_of(supervisor.acquire("alpha", None))
        await asyncio.sleep(0.25)
        failure = await error_of(supervisor.acquire("alpha", None))
        assert isinstance(failure, EngineDied)
        assert "not tried again" not in failure.message
        assert len(watch.ended) == 4


async def test_a_new_file_gets_a_new_chance(supervising: Any, models_dir: Path) -> None:
    async with supervising(script="exit") as (supervisor, watch):
        for _ in range(3):
            await error_of(supervisor.acquire("alpha", None))
        os.utime(models_dir / "alpha.gguf", (1, 1))
        await error_of(supervisor.acquire("alpha", None))
        assert len(watch.ended) == 4


async def test_a_model_that_cannot_load_does_not_disturb_another(supervising: Any, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(SCRIPT).parent)!r})\n"
        "import io, os, struct, scripted_engine\n"
        "from localrun import framing\n"
        "body = framing.read_body(sys.stdin.buffer)\n"
        "if 'beta' in framing.decode_to_engine(body).model_path: os.abort()\n"
        "sys.stdin = type('In', (), {'buffer': io.BufferedReader(sys.stdin.buffer.raw)})\n"
        "scripted_engine._send(scripted_engine.READY)\n"
        "while framing.read_body(sys.stdin.buffer) is not None: pass\n"
    )
    async with supervising(script=script) as (supervisor, _):
        lease = await supervisor.acquire("alpha", None)
        assert isinstance(await error_of(supervisor.acquire("beta", None)), BadModelFile)
        assert lease.link.error is None


def test_the_engine_is_started_by_module_name() -> None:
    assert supervisor_module.ENGINE_COMMAND[-2:] == ("-m", "localrun.engine.process")


async def test_a_copy_shares_the_engine_and_keeps_its_own_parameters(supervising: Any, models_dir: Path) -> None:
    store = Store(models_dir)
    base = creation.base_of(store, "alpha", None)
    naming.point(store, "twin", creation.assemble(base, Changes(system="Be a twin."), now=datetime.now(UTC)))
    async with supervising() as (supervisor, watch):
        alpha, twin = await supervisor.acquire("alpha", -1), await supervisor.acquire("twin", -1)
        assert alpha.link is twin.link
        assert (alpha.model.name, alpha.model.system) == ("alpha", "")
        assert (twin.model.name, twin.model.system) == ("twin", "Be a twin.")
        alpha.release()
        twin.release()
        assert watch.loaded == ["alpha"]
        assert await supervisor.unload("twin")
        assert watch.ended == ["alpha"]


async def test_other_adapters_are_another_engine(supervising: Any, models_dir: Path, tmp_path: Path) -> None:
    store = Store(models_dir)
    write_lora(models_dir / "alpha.gguf", tmp_path / "lora.gguf")
    base = creation.base_of(store, "alpha", None)
    adapter = creation.adapters(store, base, ["./lora.gguf"], tmp_path)[0]
    naming.point(store, "tuned", creation.assemble(base, Changes(adapters=(adapter,)), now=datetime.now(UTC)))
    async with supervising() as (supervisor, watch):
        alpha, tuned = await supervisor.acquire("alpha", -1), await supervisor.acquire("tuned", -1)
        assert alpha.link is not tuned.link
        alpha.release()
        tuned.release()
        await supervisor.unload("tuned")
        assert watch.ended == ["tuned"]
        assert [row.model for row in supervisor.loaded()] == ["alpha"]
