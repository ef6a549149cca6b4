"""How the daemon learns of GPUs. None is needed here: the process that is asked is a stand-in."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from localrun.models.fit import Gpu
from localrun.server.engines.gpus import gpus, has_gpu_library


def printing(text: str) -> list[str]:
    return [sys.executable, "-c", f"print({text!r})"]


async def test_what_the_process_prints_are_the_gpus():
    rows = [("Card", 8 << 30, False, 12 << 30), ("Chip", 1, True, 2)]
    assert await gpus(printing(json.dumps(rows))) == tuple(Gpu(*row) for row in rows)


async def test_a_process_that_fails_finds_none():
    assert await gpus([sys.executable, "-c", "raise SystemExit(1)"]) == ()
    assert await gpus(printing("no JSON")) == ()


async def test_the_real_process_answers():
    assert isinstance(await gpus(), tuple)


def test_only_a_build_with_a_gpu_library_is_asked(tmp_path: Path):
    (tmp_path / "lib").mkdir()
    assert not has_gpu_library(tmp_path)
    (tmp_path / "lib" / "libggml-cpu.so").touch()
    assert not has_gpu_library(tmp_path)
    (tmp_path / "lib" / "libggml-cuda.so.1").touch()
    assert has_gpu_library(tmp_path)


def test_an_emptied_gpu_has_all_its_memory():
    assert Gpu("Card", 3, False, 10).emptied.free_bytes == 10
    assert Gpu("Card", 3).emptied.free_bytes == 3
