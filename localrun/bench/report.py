"""A comparison as text for a terminal: what was compared, a table per workload, the decode curve, verdicts.

Pure: from numbers to lines. Only the chart needs a library, which is imported when it is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from localrun.bench.chart import bars
from localrun.bench.compare import Comparison, Spread, Verdict
from localrun.bench.cost import cost_per_million_tokens
from localrun.bench.decode_curve import CurvePoint
from localrun.bench.knee import knee
from localrun.bench.results import RunResult, Workload, better
from localrun.bench.streams import CUT_SHORT
from localrun.bench.table import shown

_COMPLETION = "completion_ratio"
_MAX_PROBLEMS = 3


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


def comparison_tables(
    comparisons: Sequence[Comparison], workloads: Mapping[str, Workload], contenders: Sequence[str]
) -> list[str]:
    """A table per workload with the metrics of its headline; the first contender is the subject. Where requests did not
    complete, how many did is a row too: a server that drops requests is quick with the rest."""
    lines: list[str] = []
    for name in dict.fromkeys(each.workload for each in comparisons):
        own = {each.metric: each for each in comparisons if each.workload == name}
        metrics = workloads[name].shown(dict.fromkeys(own, 0.0)) if name in workloads else list(own)
        metrics += [metric for metric, each in own.items() if metric == _COMPLETION and _lowest(each) < 1]
        rows = [_row(own[metric], contenders) for metric in dict.fromkeys(metrics)]
        lines += [f"{name}: {workloads[name].summary}" if name in workloads else name]
        lines += [f"  {line}" for line in aligned(("metric", *contenders, "ratio", "lowest to highest"), rows)]
        lines += [*_first_as_bars([own[metric] for metric in metrics], contenders), ""]
    return lines


def _first_as_bars(comparisons: Sequence[Comparison], contenders: Sequence[str]) -> list[str]:
    """The first metric that is a time, which a person sees at a glance; rates have their curve."""
    times = [each for each in comparisons if each.metric.endswith("_s") and better(each.metric) == "lower"]
    if not times:
        return []
    spreads = {contenders[0]: times[0].subject, **times[0].opponents}
    medians = [(name, spreads[name].median) for name in contenders if name in spreads]
    rows = [(name, median, shown(times[0].metric, median)) for name, median in medians]
    return ["", f"  {times[0].metric}", *(f"    {line}" for line in bars(rows))]


def note_lines(results: Iterable[RunResult]) -> list[str]:
    """What the runs have to say beside numbers, and the first reasons of requests that failed; each once."""
    notes: dict[str, None] = {}
    for result in results:
        problems = dict.fromkeys(each.problem for each in result.records if each.problem and each.problem != CUT_SHORT)
        for text in [result.note, *list(problems)[:_MAX_PROBLEMS]]:
            if text:
                notes[f"{result.workload}, {result.target.name}: {text}"] = None
    return list(notes)


def _lowest(comparison: Comparison) -> float:
    return min(spread.lowest for spread in (comparison.subject, *comparison.opponents.values()))


def _row(comparison: Comparison, contenders: Sequence[str]) -> list[str]:
    spreads = {contenders[0]: comparison.subject, **comparison.opponents}
    medians = [_median(comparison, name, spreads.get(name)) for name in contenders]
    ratio = comparison.ratio
    if ratio is None:
        return [comparison.metric, *medians, "-", "-"]
    return [comparison.metric, *medians, f"{ratio.median:.2f}", f"{ratio.lowest:.2f} to {ratio.highest:.2f}"]


def _median(comparison: Comparison, name: str, spread: Spread | None) -> str:
    """The opponent that the ratio is formed with is marked."""
    if spread is None:
        return "-"
    return shown(comparison.metric, spread.median) + (" *" if name == comparison.opponent else "")


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


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """One line per threshold."""
    lines = []
    for verdict in verdicts:
        ratio = "not measured" if verdict.ratio is None else f"{verdict.ratio:.3f}"
        lines.append(f"{'met   ' if verdict.is_met else 'MISSED'}  {verdict.threshold}: {ratio}")
    return lines
