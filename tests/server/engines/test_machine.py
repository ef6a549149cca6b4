"""How much memory there is to load models into."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from localrun.server.engines import machine


def _cgroup(folder: Path, limit: str, current: int, stat: str = "") -> Path:
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(stat)
    return folder


def test_without_a_limit_it_is_what_the_system_says(tmp_path: Path) -> None:
    assert 0 < machine.available_bytes(tmp_path) <= psutil.virtual_memory().total
    assert machine.available_bytes(_cgroup(tmp_path, "max", 10)) > 10


def test_a_containers_limit_counts_and_its_file_pages_are_free(tmp_path: Path) -> None:
    stat = "anon 100\ninactive_file 2000\nactive_file 500\n"
    assert machine.available_bytes(_cgroup(tmp_path, "10000", 6000, stat)) == 10_000 - 6000 + 2500


def test_a_container_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert machine.available_bytes(_cgroup(tmp_path, "1000", 6000)) == 0


def test_private_memory_of_a_process() -> None:
    assert 0 < machine.private_bytes(os.getpid()) <= psutil.Process().memory_info().rss
    assert machine.private_bytes(2**22 + 1) == 0
