"""How much memory there is to load models into."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from localrun.errors import DeviceLost
from localrun.hardware.memory import Memory
from localrun.models.fit import Gpu
from localrun.server.engines import machine
from localrun.server.engines.machine import GpuLoad, gpus, has_gpu_library
from localrun.snapshot import GpuRow


def test_what_is_shown_of_a_container_is_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "machine_memory", lambda: Memory(4_000, 10_000))
    shown = asyncio.run(machine.MachineSampler().sample([])).system
    assert (shown.memory_total_bytes, shown.memory_available_bytes) == (10_000, 4_000)


def test_a_machine_that_hides_its_load_is_shown_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Android lets no program read /proc/stat."""
    monkeypatch.setattr(psutil, "cpu_percent", _refused)
    shown = asyncio.run(machine.MachineSampler().sample([])).system
    assert shown.cpu_percent == 0 < shown.memory_total_bytes


def _refused() -> None:
    raise PermissionError("/proc/stat")


def test_private_memory_of_a_process() -> None:
    assert 0 < machine.private_bytes(os.getpid()) <= psutil.Process().memory_info().rss
    assert machine.private_bytes(2**22 + 1) == 0


class NVMLError(Exception):
    pass


def _nvml(monkeypatch: pytest.MonkeyPatch, **calls: Any) -> SimpleNamespace:
    usual = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=5 + handle, total=24),
        "nvmlDeviceGetName": lambda handle: b"Card A" if handle == 0 else "Card B",
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=40 + handle),
    }
    stand_in = SimpleNamespace(**usual | calls)
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    return stand_in


def _fail(*_: Any) -> None:
    raise NVMLError("driver not loaded")


def test_every_gpu_is_a_row(monkeypatch: pytest.MonkeyPatch):
    _nvml(monkeypatch)
    assert GpuLoad().rows() == [
        GpuRow(name="Card A", busy_percent=40, memory_used_bytes=5, memory_total_bytes=24),
        GpuRow(name="Card B", busy_percent=41, memory_used_bytes=6, memory_total_bytes=24),
    ]


def test_a_gpu_without_memory_of_its_own_has_the_machines(monkeypatch: pytest.MonkeyPatch):
    """As in DGX Spark and in Jetsons."""

    class NotSupported(NVMLError):
        pass

    def refuse(_: object) -> None:
        raise NotSupported("Not Supported")

    _nvml(
        monkeypatch, nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetMemoryInfo=refuse, NVMLError_NotSupported=NotSupported
    )
    (row,) = GpuLoad().rows()
    assert (row.name, row.busy_percent) == ("Card A", 40)
    assert row.memory_total_bytes == psutil.virtual_memory().total


def test_without_the_package_or_a_driver_there_is_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuLoad().rows() == []
    _nvml(monkeypatch, nvmlInit=_fail)
    assert GpuLoad().rows() == []


def test_a_driver_that_goes_away_is_asked_no_more(monkeypatch: pytest.MonkeyPatch):
    stand_in = _nvml(monkeypatch)
    load = GpuLoad()
    assert len(load.rows()) == 2
    stand_in.nvmlDeviceGetCount = _fail
    assert load.rows() == []
    stand_in.nvmlDeviceGetCount = lambda: 2
    assert load.rows() == [], "one line in the log is enough"


def printing(text: str) -> list[str]:
    return [sys.executable, "-c", f"print({text!r})"]


async def test_what_the_process_prints_are_the_gpus():
    rows = [("Card", 8 << 30, False, 12 << 30), ("Chip", 1, True, 2)]
    assert await gpus(printing(json.dumps(rows))) == tuple(Gpu(*row) for row in rows)


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("raise SystemExit(1)", "exited with status 1"),
        ("print('no JSON')", "exited with status 0"),
        ("raise OSError('no such device')", "exited with status 1; its last words: OSError: no such device"),
        ("import os; os.write(2, b'card: Xid 79\\n#0 0x00007f\\n/lib/libc.so.6(+0x1) [0x7f1]\\n'); os.abort()",
         "was killed by SIGABRT; its last words: card: Xid 79"),
        ("import time; time.sleep(60)", "did not answer within 1 seconds"),
    ],
)  # fmt: skip
async def test_how_a_process_ended_that_finds_none_is_said(program: str, end: str):
    with pytest.raises(DeviceLost) as lost:
        await gpus([sys.executable, "-c", program], timeout_s=1)
    assert lost.value.message == f"the process that lists the GPUs {end}"


async def test_the_real_process_answers():
    assert isinstance(await gpus(), tuple)


def test_only_a_build_with_a_gpu_library_is_asked(tmp_path: Path):
    (tmp_path / "lib").mkdir()
    assert not has_gpu_library(tmp_path)
    (tmp_path / "lib" / "libggml-cpu.so").touch()
    assert not has_gpu_library(tmp_path)
    (tmp_path / "lib" / "libggml-cuda.so.1").touch()
    assert has_gpu_library(tmp_path)


def test_libraries_of_another_folder_are_those_that_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "lib").mkdir()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    (tmp_path / "lib" / "libggml-cuda.so").touch()
    assert not has_gpu_library(tmp_path)
    (tmp_path / "libggml-vulkan.so").touch()
    assert has_gpu_library(tmp_path)


def test_an_emptied_gpu_has_all_its_memory():
    assert Gpu("Card", 3, False, 10).emptied.free_bytes == 10
    assert Gpu("Card", 3).emptied.free_bytes == 3


def test_kills_for_memory_are_counted_where_the_kernel_says(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    assert machine.oom_kills(vmstat) is None
    vmstat.write_text("pgfault 12\n")
    assert machine.oom_kills(vmstat) is None
    vmstat.write_text("pgfault 12\noom_kill 3\n")
    assert machine.oom_kills(vmstat) == 3
