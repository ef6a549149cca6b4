"""Medians, ratios and verdicts from alternated runs.

Machines drift: another program wakes up, a core gets warm. So contenders run in turn, and a ratio is formed between
the runs of one round, which saw much the same machine; its median and its spread (lowest to highest) over the rounds
are reported. Of several opponents the one with the better median counts, metric by metric: that is at least as hard on
the subject as choosing one opponent for everything.

Pure. Does not: run anything, or decide which ratio is good; thresholds come from whoever asks.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from localrun.bench.results import RunResult, better
from localrun.errors import BadRequest

_THRESHOLD = re.compile(r"([a-z0-9_-]+):([a-z0-9_]+)(<=|>=)([0-9]*\.?[0-9]+)")


class Run(msgspec.Struct, kw_only=True):
    """One run in its round, counted from 0. The contender is `result.target.name`."""

    round_index: int
    result: RunResult


class Spread(msgspec.Struct, frozen=True):
    """Of one number over the rounds."""

    median: float
    lowest: float
    highest: float
    n_rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """`values` must not be empty."""
        return cls(statistics.median(values), min(values), max(values), len(values))


class Comparison(msgspec.Struct, kw_only=True):
    """One metric of one workload. `opponent` is the best of the others, None where no other has the metric; `ratio` is
    subject / opponent of the same round, None where no round has both or the opponent's number is 0."""

    workload: str
    metric: str
    subject: Spread
    opponents: dict[str, Spread]
    opponent: str | None
    ratio: Spread | None


class Threshold(msgspec.Struct, frozen=True):
    """What the median ratio of a metric must be: at most `limit`, or at least."""

    workload: str
    metric: str
    is_at_most: bool
    limit: float

    def __str__(self) -> str:
        return f"{self.workload}:{self.metric}{'<=' if self.is_at_most else '>='}{self.limit:g}"


class Verdict(msgspec.Struct, frozen=True):
    """`ratio` is None when the metric was not measured on both sides; that is a miss, too."""

    threshold: Threshold
    ratio: float | None

    @property
    def is_met(self) -> bool:
        if self.ratio is None:
            return False
        limit = self.threshold.limit
        return self.ratio <= limit if self.threshold.is_at_most else self.ratio >= limit


def compare(runs: Iterable[Run], subject: str) -> list[Comparison]:
    """One comparison per workload and metric that the subject has, in the order in which they were first seen."""
    values: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for run in runs:
        for metric, value in run.result.metrics.items():
            by_contender = values.setdefault((run.result.workload, metric), {})
            by_contender.setdefault(run.result.target.name, {})[run.round_index] = value
    return [
        _comparison(workload, metric, by_contender.pop(subject), by_contender)
        for (workload, metric), by_contender in values.items()
        if subject in by_contender
    ]


def judge(comparisons: Iterable[Comparison], thresholds: Iterable[Threshold]) -> list[Verdict]:
    """One verdict per threshold, in their order."""
    ratios = {(each.workload, each.metric): each.ratio.median for each in comparisons if each.ratio is not None}
    return [Verdict(threshold, ratios.get((threshold.workload, threshold.metric))) for threshold in thresholds]


def parse_threshold(text: str) -> Threshold:
    """`WORKLOAD:METRIC<=RATIO` or `>=`, such as `shared:cold_wall_s<=0.3`. Raises BadRequest for anything else."""
    found = _THRESHOLD.fullmatch(text.replace(" ", ""))
    if found is None:
        raise BadRequest(f"{text!r} is not a threshold; write WORKLOAD:METRIC<=RATIO or WORKLOAD:METRIC>=RATIO")
    workload, metric, relation, limit = found.groups()
    return Threshold(workload, metric, relation == "<=", float(limit))


def _comparison(
    workload: str, metric: str, subject: dict[int, float], others: dict[str, dict[int, float]]
) -> Comparison:
    opponents = {name: Spread.of(list(by_round.values())) for name, by_round in others.items()}
    opponent = _best(opponents, metric)
    ratios = []
    if opponent is not None:
        theirs = others[opponent]
        ratios = [value / theirs[index] for index, value in subject.items() if theirs.get(index, 0.0) != 0.0]
    return Comparison(
        workload=workload,
        metric=metric,
        subject=Spread.of(list(subject.values())),
        opponents=opponents,
        opponent=opponent,
        ratio=Spread.of(ratios) if ratios else None,
    )


def _best(opponents: dict[str, Spread], metric: str) -> str | None:
    if not opponents:
        return None
    choose = max if better(metric) == "higher" else min
    return choose(opponents, key=lambda name: opponents[name].median)
