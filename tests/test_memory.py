"""How much memory there is to load models into: on a machine, and within the limits of containers and services."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from localrun.hardware.memory import machine_memory

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def _machine(root: Path, own: str, mount: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": own, "proc/self/mountinfo": mount, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def test_without_a_limit_it_is_what_the_system_says(tmp_path: Path) -> None:
    limits = {"memory.max": "max", "memory.high": "max", "memory.current": "10"}
    free = _machine(tmp_path, "0::/", V2, {f"sys/fs/cgroup/{name}": text for name, text in limits.items()})
    found = machine_memory(free)
    assert 10_000_000 < found.available_bytes <= found.total_bytes == psutil.virtual_memory().total


def test_a_containers_limit_counts_and_its_file_pages_are_free(tmp_path: Path) -> None:
    stat = "anon 100\ninactive_file 2000\nactive_file 500"
    files = {"memory.max": "10000", "memory.current": "6000", "memory.stat": stat}
    _machine(tmp_path, "0::/", V2, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert machine_memory(tmp_path) == (10_000 - 6000 + 2500, 10_000)


def test_a_container_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "1000", "sys/fs/cgroup/memory.current": "6000"}
    assert machine_memory(_machine(tmp_path, "0::/", V2, files)) == (0, 1000)


def test_a_services_limit_counts_wherever_it_is_on_the_way_up(tmp_path: Path) -> None:
    """`MemoryMax=` of a unit, and `MemoryHigh=` of the slice that it is in."""
    folder = "sys/fs/cgroup/user.slice/app.slice/localrun.service"
    files = {
        f"{folder}/memory.max": "9000",
        f"{folder}/memory.current": "2000",
        f"{folder}/../memory.max": "max",
        f"{folder}/../memory.high": "8000",
        f"{folder}/../memory.current": "7000",
        f"{folder}/../../memory.max": "max",
        f"{folder}/../../memory.current": "7000",
    }
    own = "0::/user.slice/app.slice/localrun.service"
    (tmp_path / folder).mkdir(parents=True)
    assert machine_memory(_machine(tmp_path, own, V2, files)) == (1000, 8000)


@pytest.mark.parametrize("own", ["/docker/4711", "/"])
def test_version_1_has_limits_too(tmp_path: Path, own: str) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "10000",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "6000",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 2000\ntotal_active_file 500",
    }
    mount = V1.replace("0:30 /", "0:30 /docker/4711") if own != "/" else V1
    assert machine_memory(_machine(tmp_path, f"4:memory:{own}", mount, files)) == (6500, 10_000)


def test_where_the_system_hides_it_memory_is_known_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    total = psutil.virtual_memory().total

    def refused() -> None:
        raise PermissionError("/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", refused)
    found = machine_memory(Path("/nowhere"))
    assert 0 < found.available_bytes < found.total_bytes
    assert abs(found.total_bytes - total) < total / 100
