from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from localrun.bench.metrics import CurvePoint
from localrun.bench.report import LatencyRange, latency_ranges, plot, require_matplotlib
from localrun.bench.results import RunResult, Target
from localrun.errors import NotSupported


def result(workload: str, **metrics: float) -> RunResult:
    target = Target("us", "http://127.0.0.1:1", "m")
    return RunResult(workload=workload, target=target, parameters={}, metrics=dict(metrics), records=[])


def four(start: str, value: float) -> dict[str, float]:
    return {
        f"{start}_{end}_s": value * factor
        for end, factor in zip(("p50", "p95", "p99", "max"), (1, 2, 3, 4), strict=True)
    }


def test_each_percentile_is_the_median_over_the_rounds():
    [found] = latency_ranges([result("shared", **four("cold_ttft", value)) for value in (1.0, 10.0, 2.0)])
    assert found == LatencyRange(
        target="us", label="shared cold", kind="ttft", p50_s=2.0, p95_s=4.0, p99_s=6.0, max_s=8.0
    )


def test_first_tokens_and_gaps_are_apart_and_a_workload_without_parts_has_its_name():
    found = latency_ranges([result("chat", **four("ttft", 1.0), **four("itl", 0.1), **four("tpot", 0.1), wall_s=3.0)])
    assert [(each.label, each.kind) for each in found] == [("chat", "ttft"), ("chat", "itl")]


POINTS = [
    CurvePoint(
        streams=streams, tokens_per_s=100.0 * streams**0.5, request_tokens_per_s=100.0, prefill_tokens_per_s=0.0,
        bound_tokens_per_s=500.0 * streams,
    )
    for streams in (1, 4, 8)
]  # fmt: skip
RANGES = [
    LatencyRange(target=target, label=label, kind=kind, p50_s=0.1, p95_s=0.2, p99_s=0.3, max_s=1.0)
    for target in ("us", "them")
    for label in ("shared cold", "stall")
    for kind in ("ttft", "itl")
]


def size(path: Path) -> tuple[int, int]:
    """Width and height from the PNG header."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_png_has_a_panel_for_the_curve_and_one_for_each_kind_of_latency(tmp_path: Path):
    plot(tmp_path / "all.png", {"us": POINTS, "them": POINTS}, RANGES)
    plot(tmp_path / "curve.png", {"us": POINTS}, [])
    width, height = size(tmp_path / "all.png")
    assert size(tmp_path / "curve.png") == (width, height // 3)


def test_without_the_decode_workload_there_are_only_latencies(tmp_path: Path):
    plot(tmp_path / "out.png", {}, [each for each in RANGES if each.kind == "ttft"])
    assert size(tmp_path / "out.png")[1] > 0


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NotSupported, match=r"localrun\[bench\]"):
        require_matplotlib()
