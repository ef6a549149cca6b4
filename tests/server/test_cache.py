"""The daemon's view of what is kept: over engines and folders, shown and cleared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from localrun import kv_folders
from localrun.errors import ModelNotFound
from localrun.kv_folders import About
from localrun.server.runtime import Runtime


@pytest.fixture
def kv(home: Path) -> Path:
    """The folder that a runtime uses."""
    return kv_folders.kv_folder(home / "cache")


def keep(root: Path, digit: str, model: str, model_path: Path) -> Path:
    """A folder with one block of 1,000 bytes."""
    folder = root / (digit * 32)
    folder.mkdir(parents=True)
    kv_folders.write_about(folder, About(model=model, model_path=str(model_path), build="b", created_at_s=0.0))
    (folder / kv_folders.entry_name(digit.encode() * 16)).write_bytes(b"x" * 1000)
    return folder


@asynccontextmanager
async def lent(runtime: Runtime, model: str) -> AsyncIterator[Any]:
    lease = await runtime.supervisor.acquire(model, None)
    try:
        yield lease
    finally:
        lease.release()


async def kept(runtime: Runtime, generate: Any, what: str, model: str = "alpha") -> Any:
    """The row of a model once `what` of it, an attribute's name, is not 0."""
    await generate(runtime, model, text="a prompt that is long enough to be kept " * 20)
    for _ in range(600):
        (row,) = [row for row in (await runtime.cache.report()).models if row.model == model]
        if getattr(row, what):
            return row
        await asyncio.sleep(0.05)
    raise AssertionError(f"nothing was kept: {row}")


async def test_folders_and_engines_of_one_file_are_one_row(running: Any, kv: Path, models_dir: Path) -> None:
    async with running(disk_cache_bytes=1_000_000) as runtime:
        path = (models_dir / "alpha.gguf").resolve()
        keep(kv, "1", "alpha", path)
        keep(kv, "2", "alpha", path)
        keep(kv, "3", "was-here", models_dir / "gone.gguf")
        async with lent(runtime, "alpha"):
            report = await runtime.cache.report()
        rows = {row.model: row for row in report.models}
        assert set(rows) == {"alpha", "was-here"}
        assert (rows["alpha"].disk_entries, rows["was-here"].disk_entries) == (2, 1)
        assert rows["alpha"].pid is not None
        assert rows["alpha"].kv_cells == 4096
        assert rows["was-here"].pid is None
        assert rows["was-here"].disk_used_at_s is not None
        assert report.disk_bytes == 3000
        assert report.disk_limit_bytes == 1_000_000
        assert report.disk_folder == str(kv)


async def test_clearing_one_model_leaves_the_others(running: Any, kv: Path, models_dir: Path) -> None:
    async with running(disk_cache_bytes=0) as runtime:
        alpha = keep(kv, "1", "alpha", (models_dir / "alpha.gguf").resolve())
        beta = keep(kv, "2", "beta", (models_dir / "beta.gguf").resolve())
        cleared = await runtime.cache.clear("alpha", ram=True, disk=False)
        assert (cleared.disk_bytes, alpha.exists()) == (0, True)
        cleared = await runtime.cache.clear("alpha:latest", ram=False, disk=True)
        assert (cleared.disk_bytes, alpha.exists(), beta.exists()) == (1000, False, True)
        with pytest.raises(ModelNotFound):
            await runtime.cache.clear("nonesuch", ram=True, disk=True)


async def test_what_a_deleted_model_left_can_be_cleared_by_its_old_name(
    running: Any, kv: Path, models_dir: Path
) -> None:
    async with running(disk_cache_bytes=0) as runtime:
        folder = keep(kv, "1", "deleted", models_dir / "deleted.gguf")
        cleared = await runtime.cache.clear("deleted", ram=True, disk=True)
        assert cleared.disk_bytes == 1000
        assert not folder.exists()


async def test_clearing_everything_takes_folders_without_a_note_too(running: Any, kv: Path, models_dir: Path) -> None:
    async with running(disk_cache_bytes=0) as runtime:
        folder = keep(kv, "1", "deleted", models_dir / "deleted.gguf")
        (folder / kv_folders.ABOUT_NAME).unlink()
        assert [row.model for row in (await runtime.cache.report()).models] == ["1" * 32]
        assert (await runtime.cache.clear(None, ram=True, disk=True)).disk_bytes == 1000
        assert kv_folders.survey(kv) == []


async def test_an_engine_forgets_what_it_keeps_in_memory(running: Any, generate: Any) -> None:
    async with running(disk_cache_bytes=0) as runtime:
        before = await kept(runtime, generate, "ram_bytes")
        assert before.hit_rate == 0.0
        cleared = await runtime.cache.clear("alpha", ram=True, disk=True)
        assert cleared.ram_bytes >= before.ram_bytes  # more was saved since
        again = await generate(runtime, "alpha", text="a prompt that is long enough to be kept " * 20)
        assert again[-1].usage.n_cached == 0


async def test_an_engine_forgets_what_it_keeps_on_disk_alone(running: Any, generate: Any, kv: Path) -> None:
    async with running(disk_cache_bytes=100_000_000) as runtime:
        before = await kept(runtime, generate, "disk_entries")
        assert sum(folder.n_entries for folder in kv_folders.survey(kv)) >= before.disk_entries
        cleared = await runtime.cache.clear("alpha", ram=False, disk=True)
        assert cleared.ram_bytes == 0
        assert cleared.disk_bytes > 0  # a short last block may have given way to a longer one since
        (folder,) = kv_folders.survey(kv)
        assert folder.about is not None
        assert folder.about.model == "alpha"
        again = await generate(runtime, "alpha", text="a prompt that is long enough to be kept " * 20)
        assert again[-1].usage.n_cached > 0
