"""The daemon's downloads: one for all who ask, cancelled, resumed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from localrun.errors import BadRequest, Cancelled, DownloadFailed, ModelNotFound, NotFound, Unavailable
from localrun.hardware.memory import Memory
from localrun.models import builtin
from localrun.models.download.huggingface import Hub
from localrun.models.download.plan import Item, PlannedFile, RemotePlan
from localrun.models.fit import Gpu
from localrun.models.pull import FIRST_BYTES
from localrun.models.storage.manifest import Place, Role, Source, StoredFile
from localrun.models.storage.store import Store
from localrun.server import pulls as pulls_module
from localrun.server.pulls import PullProgress, Pulls
from tests.daemon import running_daemon
from tests.hub.hanging import HangingHub
from tests.registry import Layer, Registry
from tests.server.waiting import until

GGUF = builtin.model_path().read_bytes() if builtin.model_path().is_file() else b""
SLOW_BYTES_PER_S = 600_000

pytestmark = pytest.mark.skipif(not GGUF, reason="the built-in model's file is not there")


@pytest.fixture
def registry():
    with Registry() as running:
        yield running


@contextlib.asynccontextmanager
async def started(folder: Path, *, rate: int = 0) -> AsyncIterator[Pulls]:
    hub = Hub(endpoint="http://127.0.0.1:9", token=None, cache_folder=folder / "hub")
    store = Store(folder / "models", hub_cache_folder=folder / "hub")
    pulls = Pulls(store, journal=folder / "pulls.json", rate_bytes_per_s=rate, hub=hub)
    await pulls.start()
    try:
        yield pulls
    finally:
        await pulls.stop()


async def ask(pulls: Pulls, name: str) -> list[dict[str, Any]]:
    with pulls.joined(name) as progress:
        return [status async for status in progress.statuses()]


def partials(folder: Path) -> list[Path]:
    return list(folder.rglob("*localrun-partial"))


async def test_many_who_ask_share_one_download(tmp_path: Path, registry: Registry):
    name = registry.add("library/fox", Layer("model", GGUF))
    spelled = (name, name.removesuffix(":latest"), name.replace("fox", "FOX"), name)
    async with started(tmp_path) as pulls:
        registry.bytes_per_s = 20_000_000
        heard = await asyncio.gather(*(ask(pulls, each) for each in spelled))
        assert all(lines[-1] == {"status": "success"} for lines in heard)
        assert registry.asked_for("/manifests/") == 1
        assert registry.content_bytes == len(GGUF) + FIRST_BYTES
        assert [(row.state, row.completed_bytes) for row in pulls.rows()] == [("done", len(GGUF))]
    assert not (tmp_path / "pulls.json").exists()


async def test_two_models_with_the_same_file_share_it(tmp_path: Path, registry: Registry):
    names = [registry.add(f"library/{name}", Layer("model", GGUF), Layer("system", name.encode())) for name in "ab"]
    registry.bytes_per_s = 20_000_000
    async with started(tmp_path) as pulls:
        heard = await asyncio.gather(*(ask(pulls, name) for name in names))
        assert all(lines[-1] == {"status": "success"} for lines in heard)
    store = Store(tmp_path / "models")
    assert store.resolve(names[0]).path == store.resolve(names[1]).path
    assert [store.resolve(name).system for name in names] == ["a", "b"]
    assert registry.content_bytes - len(GGUF) - 2 <= 2 * FIRST_BYTES
    assert not partials(tmp_path)


async def test_one_of_many_may_leave_and_the_last_one_ends_it(tmp_path: Path, registry: Registry):
    name = registry.add("library/fox", Layer("model", GGUF))
    registry.bytes_per_s = SLOW_BYTES_PER_S
    async with started(tmp_path) as pulls:
        first, second = (asyncio.create_task(ask(pulls, name)) for _ in range(2))
        await until(lambda: any(row.completed_bytes for row in pulls.rows()))
        first.cancel()
        await asyncio.sleep(0.1)
        assert pulls.n_running == 1
        second.cancel()
        await until(lambda: pulls.n_running == 0)
        await until(lambda: not (tmp_path / "pulls.json").exists())
        sent = registry.content_bytes
        assert sent < len(GGUF)
        assert partials(tmp_path)
        registry.bytes_per_s = None
        # Asked for again at once, it goes on where it was.
        assert (await ask(pulls, name))[-1] == {"status": "success"}
        assert registry.content_bytes < len(GGUF) + 2_000_000
        assert not partials(tmp_path)


async def test_a_pull_is_cancelled_by_name(tmp_path: Path, registry: Registry):
    name = registry.add("library/fox", Layer("model", GGUF))
    registry.bytes_per_s = SLOW_BYTES_PER_S
    async with started(tmp_path) as pulls:
        asking = asyncio.create_task(ask(pulls, name))
        await until(lambda: any(row.completed_bytes for row in pulls.rows()))
        await pulls.cancel(name)
        with pytest.raises(Cancelled, match="kept for the next"):
            await asking
        with pytest.raises(NotFound):
            await pulls.cancel(name)
        assert pulls.rows()[0].state == "cancelled"


async def test_a_new_daemon_goes_on_with_what_the_old_one_pulled(tmp_path: Path, registry: Registry):
    name = registry.add("library/fox", Layer("model", GGUF))
    registry.bytes_per_s = SLOW_BYTES_PER_S
    async with started(tmp_path) as pulls:
        asking = asyncio.create_task(ask(pulls, name))
        await until(lambda: any(row.completed_bytes > 500_000 for row in pulls.rows()))
    with pytest.raises(Unavailable, match="starts again"):
        await asking
    registry.bytes_per_s = None
    async with started(tmp_path) as pulls:
        # Nobody has to ask, and who asks and leaves does not end it.
        with contextlib.suppress(BadRequest), pulls.joined(name):
            pass
        await until(lambda: [row.state for row in pulls.rows()] == ["done"])
        assert Store(tmp_path / "models").resolve(name).path.read_bytes() == GGUF
        assert registry.content_bytes < len(GGUF) + 2_000_000
        await until(lambda: not (tmp_path / "pulls.json").exists())


async def test_the_memory_is_that_of_the_machine_or_of_its_larger_gpus(monkeypatch: pytest.MonkeyPatch):
    gpus: list[Gpu] = []

    async def installed() -> tuple[Gpu, ...]:
        return tuple(gpus)

    monkeypatch.setattr(pulls_module, "answering_gpus", installed)
    monkeypatch.setattr(pulls_module, "machine_memory", lambda: Memory(16_000, 16_000))
    assert await pulls_module.memory_bytes() == 16_000
    gpus += [Gpu("integrated", 64_000, is_shared=True), Gpu("small", 1_000, total_bytes=8_000)]
    assert await pulls_module.memory_bytes() == 16_000
    gpus.append(Gpu("large", 2_000, total_bytes=24_000))
    assert await pulls_module.memory_bytes() == 32_000


@pytest.mark.parametrize("content", [b"", b"[", b'[{"model": "../../x"}]', b'[{"model": 5}]', b"\xff"])
async def test_a_damaged_journal_is_in_nobody_s_way(tmp_path: Path, registry: Registry, content: bytes):
    (tmp_path / "pulls.json").write_bytes(content)
    name = registry.add("library/fox", Layer("model", GGUF))
    async with started(tmp_path) as pulls:
        assert pulls.n_running == 0
        assert (await ask(pulls, name))[-1] == {"status": "success"}


async def test_without_a_network_the_model_that_is_here_is_kept(tmp_path: Path):
    async with started(tmp_path) as pulls:
        with Registry() as registry:
            name = registry.add("library/fox", Layer("model", GGUF))
            await ask(pulls, name)
            with pytest.raises(ModelNotFound):
                await ask(pulls, f"{registry.host}/library/gone")
        heard = await ask(pulls, name)
        assert heard[-1] == {"status": "success"}
        assert "newer version" in heard[-2]["status"]


async def test_the_rate_is_limited(tmp_path: Path, registry: Registry):
    name = registry.add("library/fox", Layer("model", GGUF[:1] + GGUF[1:]))
    async with started(tmp_path, rate=1_000_000) as pulls:
        asking = asyncio.create_task(ask(pulls, name))
        await until(lambda: any(row.completed_bytes for row in pulls.rows()))
        began_s, begun = time.monotonic(), pulls.rows()[0].completed_bytes
        await asyncio.sleep(1.5)
        n_bytes = pulls.rows()[0].completed_bytes - begun
        assert n_bytes < 3_000_000 * (time.monotonic() - began_s)
        asking.cancel()


DIGESTS = ("a" * 64, "b" * 64)


def planned(*sizes: int) -> RemotePlan:
    files = []
    for size, digest in zip(sizes, DIGESTS, strict=False):
        item = Item(url="http://x/" + digest, target=Path("/blobs") / digest, name="x", size_bytes=size, sha256=digest)
        stored = StoredFile(role=Role.MODEL, place=Place.BLOB, size_bytes=size, digest=f"sha256:{digest}")
        files.append(PlannedFile(item, stored))
    return RemotePlan(repo="r", revision="1", files=tuple(files), source=Source(kind="registry"))


async def told(progress: PullProgress) -> list[dict[str, Any]]:
    return [status async for status in progress.statuses()]


def line(digest: str, total: int, completed: int = 0) -> dict[str, Any]:
    said = {"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}", "total": total}
    return said | {"completed": completed} if completed else said


async def test_who_comes_late_hears_everything_in_order():
    progress = PullProgress("m")
    plan = planned(100, 50)
    progress.status("pulling manifest")
    progress.planned(plan)
    for item, n_bytes in zip(plan.items, (100, 50), strict=True):
        progress.advanced(item, n_bytes)
        progress.verifying(item)
    progress.status("verifying sha256 digest")
    progress.status("success")
    progress.end(None)
    assert await told(progress) == [
        {"status": "pulling manifest"},
        line(DIGESTS[0], 100, 100),
        line(DIGESTS[1], 50, 50),
        {"status": "verifying sha256 digest"},
        {"status": "success"},
    ]


async def test_every_watcher_sees_the_start_and_the_end_and_nothing_goes_backwards():
    progress = PullProgress("m")
    plan = planned(1000)
    watchers = [asyncio.create_task(told(progress)) for _ in range(3)]
    progress.status("pulling manifest")
    progress.planned(plan)
    for n_bytes in (0, 10, 500, 400, 1000):
        await asyncio.sleep(0.05)
        progress.advanced(plan.items[0], n_bytes)
    progress.end(None)
    for watcher in watchers:
        lines = await watcher
        completed = [said.get("completed", 0) for said in lines if "total" in said]
        assert completed == sorted(completed)
        assert (completed[0], completed[-1]) == (0, 1000)
        assert lines[0] == {"status": "pulling manifest"}


async def test_a_failure_comes_after_all_that_was_said():
    progress = PullProgress("m")
    progress.status("pulling manifest")
    progress.end(DownloadFailed("no line"))
    statuses = progress.statuses()
    assert await anext(statuses) == {"status": "pulling manifest"}
    with pytest.raises(DownloadFailed, match="no line"):
        await anext(statuses)
    assert (progress.row().state, progress.row().error) == ("failed", "no line")


async def test_the_row_counts_all_files_and_not_the_rate_of_what_was_there_before():
    progress = PullProgress("m")
    assert progress.row().state == "planning"
    plan = planned(10_000_000, 50)
    progress.planned(plan)
    progress.advanced(plan.items[0], 9_000_000)
    row = progress.row()
    assert (row.state, row.completed_bytes, row.total_bytes) == ("pulling", 9_000_000, 10_000_050)
    assert (row.bytes_per_s, row.eta_s) == (0, None)
    await asyncio.sleep(0.3)
    progress.advanced(plan.items[0], 9_100_000)
    row = progress.row()
    assert 0 < row.bytes_per_s < 1_000_000
    assert row.eta_s is not None
    assert row.eta_s > 1


N_SEARCHES = 40


def test_abandoned_searches_keep_neither_requests_nor_the_end_waiting() -> None:
    with HangingHub() as hub, running_daemon(HF_ENDPOINT=hub.endpoint) as daemon:
        for number in range(N_SEARCHES):
            with socket.create_connection(("127.0.0.1", daemon.port)) as client:
                query = f"/localrun/v1/search?query=fox{number}"
                client.sendall(f"GET {query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                deadline_s = time.monotonic() + 30
                while not hub.connections:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.01)
        daemon.http.timeout = 10.0
        assert daemon.post("/api/chat", model="tiny", messages=[{"role": "user", "content": "hi"}]).status_code == 200
        assert daemon.http.get("/api/tags").status_code == 200
        assert daemon.stop() == 0
        assert all(connection.fileno() >= 0 for connection in hub.connections), "none was ever answered"
