"""Results as text for a terminal: a line per metric, medians over the rounds with their spread.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localrun.bench.percentiles import percentile
from localrun.bench.results import Parameter, RunResult, Workload
from localrun.bench.streams import CUT_SHORT

MAX_PROBLEMS = 3
ALWAYS_SHOWN = ("completion_ratio", "rss_bytes")


def table(results: Sequence[RunResult], workloads: Mapping[str, Workload], *, is_verbose: bool = False) -> str:
    """The headline of each workload, or with `is_verbose` every metric; then what was skipped and what failed."""
    lines: list[str] = []
    for name in dict.fromkeys(result.workload for result in results):
        runs = [result for result in results if result.workload == name]
        lines += [f"{name}: {workloads[name].summary}", *_rows(runs, workloads[name], is_verbose=is_verbose)]
        sizes = {key: value for key, value in runs[-1].parameters.items() if key != "seed"}
        lines += ["  with " + ", ".join(f"{key} {_plain(value)}" for key, value in sizes.items())] if sizes else []
        lines += [f"  note: {note}" for note in dict.fromkeys(run.note for run in runs if run.note)]
        problems = dict.fromkeys(record.problem for run in runs for record in run.records)
        lines += [f"  failed: {problem}" for problem in problems if problem not in ("", CUT_SHORT)][:MAX_PROBLEMS]
        lines.append("")
    return "\n".join(lines)


def _rows(runs: list[RunResult], workload: Workload, *, is_verbose: bool) -> list[str]:
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
