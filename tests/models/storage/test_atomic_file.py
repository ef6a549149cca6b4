"""Files appear whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localrun.models.storage import atomic_file


def test_a_file_is_replaced_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with atomic_file.replacing(path) as file:
        file.write(b"one")
        assert not path.exists()

    def fail() -> None:
        with atomic_file.replacing(path) as file:
            file.write(b"two")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_bytes() == b"one"
    assert list(path.parent.iterdir()) == [path]


def test_only_what_a_dead_writer_left_is_stale(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    left = tmp_path / f".{dead.stdout.strip()}-{'0' * 16}.localrun-temp"
    forgotten = tmp_path / f".{os.getpid()}-{'1' * 16}.localrun-temp"
    for path in (left, forgotten, tmp_path / "file", tmp_path / ".1-2.localrun-temp"):
        path.touch()
    with atomic_file.temporary(tmp_path) as writing:
        writing.touch()
        assert set(atomic_file.stale(tmp_path)) == {left, forgotten}
    assert atomic_file.stale(tmp_path / "nowhere") == ()
