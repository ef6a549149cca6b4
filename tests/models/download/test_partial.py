"""The lock of a file that is being downloaded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from localrun.models.download import partial


def test_one_waits_for_the_other_and_no_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "model.lock"
    order = []

    async def work(name: str) -> None:
        async with partial.held(path, is_kept=False):
            order.append(f"{name} begins")
            await asyncio.sleep(0.05)
            with partial.held_at_once(path, is_kept=True) as is_mine:
                assert not is_mine
            order.append(f"{name} ends")

    async def both() -> None:
        await asyncio.gather(work("a"), work("b"))

    asyncio.run(both())
    assert sorted(order[:2]) == order[:2]
    assert [entry.split()[1] for entry in order] == ["begins", "ends"] * 2
    assert not path.exists()


def test_the_lock_is_released_where_an_open_file_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows; there filelock deletes the file itself once it is closed."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "The process cannot access the file because it is being used by another process")

    path = tmp_path / "model.lock"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        with partial.held_at_once(path, is_kept=False) as is_mine:
            assert is_mine
    with partial.held_at_once(path, is_kept=False) as is_mine:
        assert is_mine
    assert not path.exists()
