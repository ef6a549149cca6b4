"""Results for people: as text for a terminal (a server's metrics, the decode curve with its chart, and the cost of
tokens) and as a picture.

Pure, but for writing the picture. What draws is imported when something is drawn: plotext, and matplotlib, which comes
with the extra `bench`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from localrun.bench.metrics import CurvePoint, knee, percentile
from localrun.bench.results import Parameter, RunResult, Workload
from localrun.bench.streams import CUT_SHORT
from localrun.errors import BadRequest, NotSupported

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# --- one server: a line per metric, medians over the rounds with their spread ---

MAX_PROBLEMS = 3
ALWAYS_SHOWN = ("completion_ratio", "rss_bytes")


def table(results: Sequence[RunResult], workloads: Mapping[str, Workload], *, is_verbose: bool = False) -> str:
    """The headline of each workload, or with `is_verbose` every metric; then what was skipped and what failed."""
    lines: list[str] = []
    for name in dict.fromkeys(result.workload for result in results):
        runs = [result for result in results if result.workload == name]
        lines += [f"{name}: {workloads[name].summary}", *_metric_rows(runs, workloads[name], is_verbose=is_verbose)]
        sizes = {key: value for key, value in runs[-1].parameters.items() if key != "seed"}
        lines += ["  with " + ", ".join(f"{key} {_plain(value)}" for key, value in sizes.items())] if sizes else []
        lines += [f"  note: {note}" for note in dict.fromkeys(run.note for run in runs if run.note)]
        problems = dict.fromkeys(record.problem for run in runs for record in run.records)
        lines += [f"  failed: {problem}" for problem in problems if problem not in ("", CUT_SHORT)][:MAX_PROBLEMS]
        lines.append("")
    return "\n".join(lines)


def _metric_rows(runs: list[RunResult], workload: Workload, *, is_verbose: bool) -> list[str]:
    measured = dict.fromkeys(metric for run in runs for metric in run.metrics)
    headline = workload.shown(dict.fromkeys(measured, 0.0))
    always = [metric for metric in ALWAYS_SHOWN if metric in measured]
    # A run that was interrupted has other metrics than those of the headline.
    rest = measured if is_verbose or not headline else ()
    names = list(dict.fromkeys([*headline, *always, *rest]))
    width = max(len(name) for name in names)
    rows = []
    for name in names:
        values = [run.metrics[name] for run in runs if name in run.metrics]
        spread = f"  ({shown(name, min(values))} to {shown(name, max(values))})" if len(values) > 1 else ""
        rows.append(f"  {name:<{width}}  {shown(name, percentile(values, 50)):>10}{spread}")
    return rows


def _plain(value: Parameter) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shown(metric: str, value: float) -> str:
    """A number with the digits and the unit that its name asks for."""
    if metric.endswith("_per_s"):
        return f"{value:.1f}/s"
    if metric.endswith("_s"):
        return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
    if metric.endswith("_bytes"):
        return f"{value / 1e6:.0f} MB"
    return f"{value:.0f}" if value == int(value) else f"{value:.3f}"


# --- what a million tokens cost ---
# Says nothing about the price of the machine itself: a price per hour includes it, watts do not.

_SECONDS_PER_HOUR = 3600.0


def price_per_hour(*, price_per_hour: float | None, watts: float | None, price_per_kwh: float | None) -> float | None:
    """The price of running for an hour, in whatever currency was given; None when nothing was.

    Raises BadRequest when both ways are given at once, or watts without a price per kilowatt-hour and the reverse.
    """
    if price_per_hour is not None:
        if watts is not None or price_per_kwh is not None:
            raise BadRequest("give --price-per-hour, or --watts and --price-per-kwh, not both", field="price_per_hour")
        return _not_negative(price_per_hour, "price_per_hour")
    if watts is None and price_per_kwh is None:
        return None
    if watts is None or price_per_kwh is None:
        raise BadRequest("--watts and --price-per-kwh go together", field="watts")
    return _not_negative(watts, "watts") / 1000.0 * _not_negative(price_per_kwh, "price_per_kwh")


def cost_per_million_tokens(hourly_price: float, tokens_per_s: float) -> float:
    """In the currency of `hourly_price`; infinite when nothing is generated."""
    if tokens_per_s <= 0:
        return float("inf")
    return hourly_price / (tokens_per_s * _SECONDS_PER_HOUR) * 1_000_000


def _not_negative(value: float, field: str) -> float:
    if not 0 <= value < float("inf"):
        raise BadRequest(f"{field} is {value:g}, which is not a price or power", field=field)
    return value


# --- the decode curve ---
# Text without colours: it must be readable in a log file, and series are told apart by their marks.

_MARKS = ("o", "x", "+", "*")
_BOUND_MARK = "dot"


_CHART_COLUMNS = 78


def text_chart(title: str, xlabel: str, n_lines: int, draw: Callable[[Any], None]) -> list[str]:
    """Lines of a chart that `draw` makes with plotext, with a logarithmic vertical axis and without colours."""
    # A quarter of the time of `localrun --help`; and it is needed for such a picture alone.
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(_CHART_COLUMNS, n_lines)
    plotext.title(title)
    plotext.yscale("log")
    plotext.xlabel(xlabel)
    draw(plotext)
    return [line.rstrip() for line in str(plotext.uncolorize(plotext.build())).splitlines()]


def decode_chart(curves: Mapping[str, Sequence[CurvePoint]]) -> list[str]:
    """Tokens per second of all streams together over the number of streams, both logarithmic, one curve per server, and
    the bound where it is known. Empty without points."""
    streams, bound = _streams_and_bound(curves)
    at = {n_streams: index for index, n_streams in enumerate(streams)}

    def draw(plotext: Any) -> None:
        for (name, points), mark in zip(curves.items(), _MARKS, strict=False):
            positions, rates = [at[point.streams] for point in points], [point.tokens_per_s for point in points]
            plotext.plot(positions, rates, marker=mark, label=name)
        if bound:
            positions = [at[n_streams] for n_streams in bound]
            plotext.plot(positions, list(bound.values()), marker=_BOUND_MARK, label="bound")
        plotext.xticks(list(at.values()), [str(n_streams) for n_streams in streams])
        rates = [point.tokens_per_s for points in curves.values() for point in points] + list(bound.values())
        ticks = _round_numbers(min(rates), max(rates))
        plotext.yticks(ticks, [f"{tick:g}" for tick in ticks])

    return text_chart("decode: tokens per second by number of streams", "streams", 20, draw) if streams else []


def _streams_and_bound(curves: Mapping[str, Sequence[CurvePoint]]) -> tuple[list[int], dict[int, float]]:
    """Numbers of streams, and the bound where it is known: the model's and the machine's, so the same for all."""
    points = [point for each in curves.values() for point in each]
    streams = sorted({point.streams for point in points})
    return streams, {point.streams: point.bound_tokens_per_s for point in points if point.bound_tokens_per_s}


def _round_numbers(lowest: float, highest: float) -> list[float]:
    """1, 2 and 5 times powers of ten between the two."""
    exponents = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
    numbers = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    return [number for number in numbers if lowest <= number <= highest]


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns: the first one left-aligned, the others right-aligned, two spaces between them."""
    table = [header, *rows]
    widths = [max(len(line[index]) for line in table) for index in range(len(header))]
    lines = []
    for line in table:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def curve_tables(curves: Mapping[str, Sequence[CurvePoint]], hourly_price: float | None) -> list[str]:
    """The decode curve of every server as numbers: all streams together, each of them, the share of the bound."""
    header = ["streams", "together", "each", "prefill", "bound", "of bound"]
    if hourly_price is not None:
        header.append("per million tokens")
    lines = []
    for name, points in curves.items():
        rows = []
        for point in points:
            share, bound = point.share_of_bound, point.bound_tokens_per_s
            row = [str(point.streams), f"{point.tokens_per_s:.1f}/s", f"{point.request_tokens_per_s:.1f}/s"]
            row += [f"{point.prefill_tokens_per_s:.0f}/s", "-" if bound is None else f"{bound:.0f}/s"]
            row += ["-" if share is None else f"{share:.0%}"]
            if hourly_price is not None:
                row.append(f"{cost_per_million_tokens(hourly_price, point.tokens_per_s):.4g}")
            rows.append(row)
        lines += [f"decode curve, tokens per second, {name}", *(f"  {line}" for line in aligned(header, rows))]
        lines += [f"  {_knee_and_plateau(points)}", ""]
    return lines


def _knee_and_plateau(points: Sequence[CurvePoint]) -> str:
    rates = {point.streams: point.tokens_per_s for point in points if point.tokens_per_s > 0}
    at = knee(rates)
    plateau = f"plateau {max(rates.values(), default=0.0):.1f}/s"
    return f"{plateau}, no knee up to {max(rates, default=0)} streams" if at is None else f"{plateau}, knee at {at}"


# --- a picture as PNG: the decode curve under the bound, and the latency percentiles ---
# Drawn without a display and without matplotlib's global state.

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
    streams, bound = _streams_and_bound(curves)
    if bound:
        ordered = sorted(bound.items())
        axes.plot(*zip(*ordered, strict=True), linestyle="--", color="black", label="bound by memory bandwidth")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
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
