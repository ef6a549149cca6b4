"""The curve of a forecast: times to first token and between tokens, and how many requests keep the promise, by rate,
with the knee marked. On a terminal, or as PNG (matplotlib, the extra `bench`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localrun.plan.search import Point

_LINES = (("first token p50", "ttft_p50_s"), ("first token p95", "ttft_p95_s"), ("between tokens p50", "itl_p50_s"),
          ("between tokens p95", "itl_p95_s"))  # fmt: skip


def _drawn(points: Sequence[Point]) -> list[Point]:
    """Runs that were given up have no times."""
    return sorted((point for point in points if not point.is_given_up), key=lambda point: point.rate_per_s)


def chart(points: Sequence[Point], knee: Point, *, width: int = 78, height: int = 18) -> list[str]:
    """Lines of text; none with fewer than two points."""
    drawn = _drawn(points)
    if len(drawn) < 2:
        return []
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height)
    plotext.title("seconds by requests per second; | is the highest rate that keeps the promise")
    rates = [point.rate_per_s for point in drawn]
    for (label, field), mark in zip(_LINES, "oOxX", strict=True):
        plotext.plot(rates, [max(1e-4, getattr(point, field)) for point in drawn], marker=mark, label=label)
    plotext.vline(knee.rate_per_s)
    plotext.yscale("log")
    plotext.xlabel("requests per second")
    return [line.rstrip() for line in str(plotext.uncolorize(plotext.build())).splitlines()]


def plot(path: Path, points: Sequence[Point], knee: Point, title: str) -> None:
    """Write a PNG. Raises NotSupported without matplotlib, and OSError."""
    from localrun.bench.plot import require_matplotlib

    require_matplotlib()
    from matplotlib.figure import Figure

    drawn = _drawn(points)
    figure = Figure(figsize=(8, 6), layout="constrained")
    times, kept = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    rates = [point.rate_per_s for point in drawn]
    for label, field in _LINES:
        times.plot(rates, [getattr(point, field) for point in drawn], marker="o", label=label)
    everything = sorted(points, key=lambda point: point.rate_per_s)
    kept.plot([each.rate_per_s for each in everything], [100 * each.kept for each in everything], marker="o")
    for axes in (times, kept):
        axes.axvline(knee.rate_per_s, linestyle="--", color="grey")
    times.set(yscale="log", ylabel="seconds", title=title)
    times.legend()
    kept.set(xlabel="requests per second", ylabel="promise kept, %", ylim=(0, 105))
    figure.savefig(path, format="png", dpi=120)
