"""Latency percentiles of many runs, gathered for a table or a picture.

Pure. TTFT and ITL stay apart: one is per request, the other per gap of all streams.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable

import msgspec

from localrun.bench.results import RunResult

_P50 = re.compile(r"(?:(.+)_)?(ttft|itl)_p50_s")


class LatencyRange(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` is `ttft` or `itl`, `label` the workload and, where it has several, its part. Each number is the median of
    that percentile over the rounds."""

    target: str
    label: str
    kind: str
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


def latency_ranges(results: Iterable[RunResult]) -> list[LatencyRange]:
    """One per server, part of a workload, and kind, in the order in which they were first seen."""
    gathered: dict[tuple[str, str, str], list[tuple[float, float, float, float]]] = {}
    for result in results:
        for name in result.metrics:
            found = _P50.fullmatch(name)
            if found is None:
                continue
            group, kind = found.groups()
            label = f"{result.workload} {group}" if group else result.workload
            start = name.removesuffix("p50_s")
            values = [result.metrics[start + end] for end in ("p50_s", "p95_s", "p99_s", "max_s")]
            key = (result.target.name, label, kind)
            gathered.setdefault(key, []).append((values[0], values[1], values[2], values[3]))
    ranges = []
    for (target, label, kind), rounds in gathered.items():
        p50_s, p95_s, p99_s, max_s = (statistics.median(values) for values in zip(*rounds, strict=True))
        ranges.append(
            LatencyRange(target=target, label=label, kind=kind, p50_s=p50_s, p95_s=p95_s, p99_s=p99_s, max_s=max_s)
        )
    return ranges
