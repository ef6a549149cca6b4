"""What the watchers of a pull are told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from localrun.errors import DownloadFailed
from localrun.models.download.item import Item
from localrun.models.manifest import Place, Role, Source, StoredFile
from localrun.models.sources.remote_plan import PlannedFile, RemotePlan
from localrun.server.pull_progress import PullProgress

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
    with pytest.raises(DownloadFailed):
        await progress.wait()
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
