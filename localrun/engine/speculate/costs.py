"""What a step costs by its rows: a table of ratios, learned while the engine is at work. Pure.

No curve would do. Kernels take rows in fours, in eights or in tiles, so 5 rows may take longer than 8, and where
reading the weights is all the work 8 rows take hardly longer than one. Only ratios are learned, and only from steps
that follow each other: a machine whose speed changes from minute to minute changes both alike. What was not measured
for a while is believed to have become cheaper, little by little, so that it is tried again (`_HOPE`).

Does not: know whose rows they are, or decide (`choice.py`).
"""

from __future__ import annotations

import math

# Before anything is known, n rows are expected to take n ** _PRIOR_SLOPE times as long as one. (Measured with 135M on
# two cores: 0.52 for Q4_0, 0.73 for Q4_1. A GPU is nearer to 0, Metal to 1.)
_PRIOR_SLOPE = 0.6
# Steps further apart than this were not computed by the same machine, so to speak.
_NEAR_S = 1.0
# The weight of the latest of many measurements. Of the first few the average counts.
_LEAST_WEIGHT = 1 / 16
# A single measurement may be this far from what was expected; beyond is a step that something else held up.
_MOST_ERROR = math.log(2.0)
_FEW = 3  # measurements
# A size that was not measured for so many steps is taken for a tenth cheaper, for three times as many for two tenths,
# then seven times, and so on: a size that is far too dear is hardly ever tried, one that nearly pays now and then.
_HOPE_STEPS, _HOPE, _MOST_HOPE = 32, 0.1, 0.8
_LATEST = 0.2  # weight of the latest plain step in what one takes


class RowCosts:
    """See the module. Learns from `observe`, answers `ratio` and `seconds`."""

    def __init__(self) -> None:
        self._logs: dict[int, float] = {}
        self._n_seen: dict[int, int] = {}
        self._n_steps = 0
        self._measured_at: dict[int, int] = {}
        self._last: tuple[int, float, float] | None = None
        self._row_s = 0.0  # of a step, over its ratio to a step of one row

    def observe(self, n_rows: int, seconds: float, ended_at_s: float) -> None:
        """A step of so many rows, computed in one pass, took so long."""
        seconds = max(seconds, 1e-9)
        self._n_steps += 1
        self._measured_at[n_rows] = self._n_steps
        last, self._last = self._last, (n_rows, seconds, ended_at_s)
        if n_rows not in self._logs and (last is None or not self._logs):
            self._logs[n_rows], self._n_seen[n_rows] = self._log(n_rows), 0
        elif last is not None and last[0] != n_rows and ended_at_s - seconds - last[2] < _NEAR_S:
            self._compare(n_rows, seconds, last[0], last[1])
        row_s = seconds / math.exp(self._log(n_rows))
        self._row_s = self._row_s + _LATEST * (row_s - self._row_s) if self._row_s else row_s

    def measured(self, n_rows: int, to: int) -> float:
        """How many times as long as steps of `to` rows those of `n_rows` took."""
        return math.exp(self._log(n_rows) - self._log(to))

    def ratio(self, n_rows: int, to: int) -> float:
        """How many times as long as a step of `to` rows one of `n_rows` takes, with some hope."""
        return math.exp(self._log(n_rows) - self._hope(n_rows) - self._log(to))

    def seconds(self, n_rows: int) -> float:
        """What a step of so many rows would take now; 0 if nothing is known."""
        return self._row_s * math.exp(self._log(n_rows))

    def is_known(self, n_rows: int) -> bool:
        """Whether steps of so many rows were measured."""
        return self._n_seen.get(n_rows, 0) > 0

    def _hope(self, n_rows: int) -> float:
        n_since = self._n_steps - self._measured_at.get(n_rows, self._n_steps)
        return min(_MOST_HOPE, _HOPE * math.log2(1 + n_since / _HOPE_STEPS))

    def _compare(self, n_rows: int, seconds: float, other_rows: int, other_s: float) -> None:
        expected = self._log(n_rows) - self._log(other_rows)
        error = math.log(seconds / other_s) - expected
        n_seen = self._n_seen.get(n_rows, 0)
        error = min(_MOST_ERROR, error)
        if n_seen < _FEW:
            # The first steps of a size pay for its graph and its memory, so the lowest measurement counts.
            weight = 1.0 if n_seen == 0 or error < 0 else 1 / (1 + n_seen)
        else:
            error = max(-_MOST_ERROR, error)
            weight = max(_LEAST_WEIGHT, 1 / (1 + n_seen))
            if n_seen >= self._n_seen.get(other_rows, 0) and other_rows in self._logs:
                # Both are known about as well: each takes its half.
                self._logs[other_rows] -= weight * error / 2
                weight /= 2
        self._logs[n_rows] = self._log(n_rows) + weight * error
        self._n_seen[n_rows] = n_seen + 1

    def _log(self, n_rows: int) -> float:
        """The logarithm of the ratio to one row: as measured, or in line with the nearest sizes that were."""
        known = self._logs.get(n_rows)
        if known is not None:
            return known
        at = math.log(n_rows)
        below = max((size for size in self._logs if size < n_rows), default=None)
        above = min((size for size in self._logs if size > n_rows), default=None)
        if below is None and above is None:
            return _PRIOR_SLOPE * at
        if below is None:
            assert above is not None
            return self._logs[above] - _PRIOR_SLOPE * (math.log(above) - at)
        if above is None:
            return self._logs[below] + _PRIOR_SLOPE * (at - math.log(below))
        part = (at - math.log(below)) / (math.log(above) - math.log(below))
        return self._logs[below] + part * (self._logs[above] - self._logs[below])
