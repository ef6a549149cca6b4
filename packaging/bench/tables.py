"""A comparison of servers as text for a terminal: a table per workload, and a line per verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bench.compare import Comparison, Spread, Verdict
from localrun.bench.report import MAX_PROBLEMS, aligned, shown
from localrun.bench.results import RunResult, Workload, better
from localrun.bench.streams import CUT_SHORT

_COMPLETION = "completion_ratio"


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
        rows = [_comparison_row(own[metric], contenders) for metric in dict.fromkeys(metrics)]
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


def _lowest(comparison: Comparison) -> float:
    return min(spread.lowest for spread in (comparison.subject, *comparison.opponents.values()))


def _comparison_row(comparison: Comparison, contenders: Sequence[str]) -> list[str]:
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


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """One line per threshold."""
    lines = []
    for verdict in verdicts:
        ratio = "not measured" if verdict.ratio is None else f"{verdict.ratio:.3f}"
        lines.append(f"{'met   ' if verdict.is_met else 'MISSED'}  {verdict.threshold}: {ratio}")
    return lines


_EIGHTHS = " ▏▎▍▌▋▊▉"


def bars(rows: Sequence[tuple[str, float, str]], *, width: int = 40) -> list[str]:
    """A bar per row of (label, value, value as text), the highest value `width` characters long. Values are >= 0."""
    highest = max((value for _, value, _ in rows), default=0.0)
    label_width = max((len(label) for label, _, _ in rows), default=0)
    return [f"{label:<{label_width}}  {_bar(value, highest, width)} {text}" for label, value, text in rows]


def _bar(value: float, highest: float, width: int) -> str:
    eighths = round(8 * width * value / highest) if highest > 0 else 0
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def note_lines(results: Iterable[RunResult]) -> list[str]:
    """What the runs have to say beside numbers, and the first reasons of requests that failed; each once."""
    notes: dict[str, None] = {}
    for result in results:
        problems = dict.fromkeys(each.problem for each in result.records if each.problem and each.problem != CUT_SHORT)
        for text in [result.note, *list(problems)[:MAX_PROBLEMS]]:
            if text:
                notes[f"{result.workload}, {result.target.name}: {text}"] = None
    return list(notes)
