"""A picture of a benchmark as PNG: the decode curve under the memory-bandwidth bound, and the latency percentiles.

Needs matplotlib, which comes with the extra `bench` and is imported only here. Draws without a display and without
matplotlib's global state.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from localrun.bench.metrics import CurvePoint
from localrun.bench.results import RunResult
from localrun.errors import NotSupported

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_P50 = re.compile(r"(?:(.+)_)?(ttft|itl)_p50_s")


class LatencyRange(NamedTuple):
    """Latency percentiles of many runs. TTFT and ITL stay apart: one is per request, the other per gap of all streams.
    `kind` is `ttft` or `itl`, `label` the workload and, where it has several, its part. Each number is the median of
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
    gathered: dict[tuple[str, str, str], list[list[float]]] = {}
    for result in results:
        for found in filter(None, map(_P50.fullmatch, result.metrics)):
            group, kind = found.groups()
            label = f"{result.workload} {group}" if group else result.workload
            start = found[0].removesuffix("p50_s")
            values = [result.metrics[start + end] for end in ("p50_s", "p95_s", "p99_s", "max_s")]
            gathered.setdefault((result.target.name, label, kind), []).append(values)
    return [
        LatencyRange(*key, *(statistics.median(values) for values in zip(*rounds, strict=True)))
        for key, rounds in gathered.items()
    ]


_KINDS = {"ttft": "time to first token", "itl": "time between tokens"}
# Told apart without colour, too.
_MARKERS = ("o", "s", "^", "D", "v", "P")


def require_matplotlib() -> None:
    """Raises NotSupported when there is no matplotlib: before hours of measuring, not after them."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise NotSupported(
            "drawing a PNG needs matplotlib, which is not installed; install the extra: pip install 'localrun[bench]'"
        ) from None


def plot(path: Path, curves: Mapping[str, Sequence[CurvePoint]], latencies: Sequence[LatencyRange]) -> None:
    """Write the picture to `path`. What was not measured is left out.

    Raises NotSupported without matplotlib, and OSError when the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    kinds = [kind for kind in _KINDS if any(each.kind == kind for each in latencies)]
    n_panels = max(1, bool(curves) + len(kinds))
    figure = Figure(figsize=(9, 5 * n_panels), layout="constrained")
    panels = iter(figure.subplots(n_panels, 1, squeeze=False)[:, 0])
    if curves:
        _draw_curves(next(panels), curves)
    for kind in kinds:
        _draw_latencies(next(panels), kind, [each for each in latencies if each.kind == kind])
    figure.savefig(path, format="png", dpi=120)


def _draw_curves(axes: Axes, curves: Mapping[str, Sequence[CurvePoint]]) -> None:
    for index, (name, points) in enumerate(curves.items()):
        rates = [point.tokens_per_s for point in points]
        axes.plot([point.streams for point in points], rates, marker=_MARKERS[index % len(_MARKERS)], label=name)
    # It is the model's and the machine's, so the same for all.
    bound = {p.streams: p.bound_tokens_per_s for points in curves.values() for p in points if p.bound_tokens_per_s}
    if bound:
        ordered = sorted(bound.items())
        axes.plot(*zip(*ordered, strict=True), linestyle="--", color="black", label="bound by memory bandwidth")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    streams = sorted({point.streams for points in curves.values() for point in points})
    axes.set_xticks(streams, [str(n_streams) for n_streams in streams])
    axes.set(title="Decode", xlabel="streams", ylabel="tokens per second, all streams together")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()


def _draw_latencies(axes: Axes, kind: str, ranges: Sequence[LatencyRange]) -> None:
    """A marker at the median, a thick line up to the 95th percentile, a thin one to the 99th, a tick at the maximum."""
    labels = list(dict.fromkeys(each.label for each in ranges))
    targets = list(dict.fromkeys(each.target for each in ranges))
    for index, target in enumerate(targets):
        own = [each for each in ranges if each.target == target]
        offset = (index - (len(targets) - 1) / 2) * 0.8 / len(targets)
        rows = [labels.index(each.label) + offset for each in own]
        color = f"C{index}"
        medians = [each.p50_s for each in own]
        axes.plot(medians, rows, _MARKERS[index % len(_MARKERS)], color=color, label=target)
        axes.hlines(rows, medians, [each.p95_s for each in own], colors=color, linewidth=3)
        axes.hlines(rows, medians, [each.p99_s for each in own], colors=color, linewidth=1)
        axes.plot([each.max_s for each in own], rows, "|", color=color)
    axes.set_xscale("log")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(title=f"Latency: {_KINDS[kind]}", xlabel="seconds: median, to p95 (thick), to p99 (thin), maximum (tick)")
    axes.grid(visible=True, axis="x", which="both", alpha=0.3)
    axes.legend()
