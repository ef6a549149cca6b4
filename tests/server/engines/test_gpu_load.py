"""The GPUs of the system row, by a stand-in for NVML with its documented calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from localrun.server.engines.gpu_load import GpuLoad
from localrun.snapshot import GpuRow


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
