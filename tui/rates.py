"""How fast things have been lately: all requests together as columns of a graph, each one as a row of block glyphs.

Fed with one sample per snapshot, by the snapshot's own time. Columns lie on a fixed raster of time, so a drawn point
never changes its height while it moves left. Seconds without a sample (the daemon was away) are gaps, not zeros.

Pure. Does not: compute rates; they are the snapshot's own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from localrun.snapshot import Snapshot

WINDOW_S = 120.0

# A snapshot is due at least once a second; two missed ones may be a busy machine, more is a gap.
_GAP_S = 3.0


class Sample(NamedTuple):
    time_s: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float


class RateSegment(NamedTuple):
    """Consecutive columns without a gap. `ages_s` run up to 0 (now) and are negative."""

    ages_s: list[float]
    decode_tokens_per_s: list[float]
    prefill_tokens_per_s: list[float]


class RateSeries:
    """Samples of the last `WINDOW_S` seconds, oldest first."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        """Appends a sample. A clock set back a little is waited for; one that jumped back starts a new series."""
        if self._samples and sample.time_s < self._samples[-1].time_s:
            if sample.time_s > self._samples[-1].time_s - _GAP_S:
                return
            self._samples.clear()
        self._samples.append(sample)
        while self._samples[0].time_s < sample.time_s - WINDOW_S:
            self._samples.popleft()

    def segments(self, n_columns: int) -> list[RateSegment]:
        """The window averaged into at most `n_columns` columns, split at gaps."""
        if not self._samples:
            return []
        now_s = self._samples[-1].time_s
        column_s = max(WINDOW_S / max(1, n_columns), 0.05)
        found: list[RateSegment] = []
        last_time_s = -math.inf
        column: list[Sample] = []
        for sample in self._samples:
            if column and math.floor(sample.time_s / column_s) != math.floor(column[0].time_s / column_s):
                _append(found[-1], column, now_s)
                column = []
            if sample.time_s - last_time_s > _GAP_S:
                if column:
                    _append(found[-1], column, now_s)
                    column = []
                found.append(RateSegment([], [], []))
            column.append(sample)
            last_time_s = sample.time_s
        _append(found[-1], column, now_s)
        return found

    def peaks(self) -> tuple[float, float]:
        """The highest decode and prefill rate in the window; 0 without samples."""
        decode = max((sample.decode_tokens_per_s for sample in self._samples), default=0.0)
        prefill = max((sample.prefill_tokens_per_s for sample in self._samples), default=0.0)
        return decode, prefill


def _append(segment: RateSegment, column: list[Sample], now_s: float) -> None:
    segment.ages_s.append(column[0].time_s - now_s)
    segment.decode_tokens_per_s.append(sum(s.decode_tokens_per_s for s in column) / len(column))
    segment.prefill_tokens_per_s.append(sum(s.prefill_tokens_per_s for s in column) / len(column))


def axis_top(peak: float) -> float:
    """The end of an axis that shows `peak`: the next of 1, 2, 4, 5, 8 times a power of ten, at least 10.

    Each of them halves into a short number, because the axis is labelled at its middle too.
    """
    if peak <= 10:
        return 10.0
    power = 10.0 ** math.floor(math.log10(peak))
    for step in (1.0, 2.0, 4.0, 5.0, 8.0):
        if peak <= step * power:
            return step * power
    return 10.0 * power


KEPT_S = 60
_SAMPLE_EVERY_S = 1.0
_GLYPHS = "▁▂▃▄▅▆▇█"


class RequestRates:
    """Samples of tokens per second by request id, oldest first: one a second for each request that the snapshot has,
    forgotten with it."""

    def __init__(self) -> None:
        self._rates: dict[str, deque[float]] = {}
        self._due_s = 0.0

    def add(self, snapshot: Snapshot) -> None:
        """Takes a sample of each request that decodes, if one is due."""
        if self._due_s - _SAMPLE_EVERY_S <= snapshot.time_s < self._due_s:
            return
        self._due_s = snapshot.time_s + _SAMPLE_EVERY_S
        alive = {row.id for row in snapshot.requests}
        self._rates = {key: rates for key, rates in self._rates.items() if key in alive}
        for row in snapshot.requests:
            if row.tokens_per_s is not None and not row.state.is_final:
                self._rates.setdefault(row.id, deque(maxlen=KEPT_S)).append(row.tokens_per_s)

    def of(self, request_id: str) -> Sequence[float]:
        """The samples of one request; none before its second token."""
        return tuple(self._rates.get(request_id, ()))

    def top(self) -> float:
        """The highest rate of any request: what all sparklines are drawn against."""
        return max((max(rates) for rates in self._rates.values() if rates), default=0.0)


def sparkline(values: Sequence[float], width: int, top: float) -> str:
    """The last `width` values as glyphs; the lowest one stands for anything down to 0."""
    if top <= 0:
        return ""
    highest = len(_GLYPHS) - 1
    return "".join(_GLYPHS[min(highest, int(value / top * len(_GLYPHS)))] for value in values[-width:])
