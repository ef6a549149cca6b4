"""Percentiles of durations: of everything added (`LatencyHistogram`), or of the last minute (`LatencyWindow`).

Pure: time is an argument. Durations fall into buckets whose bounds grow by `GROWTH`, so a percentile is right to half
of that (2 %), memory is bounded whatever the load, and adding costs one logarithm.

Does not: export to Prometheus (metrics.py has fixed buckets that can be summed over machines).
"""

from __future__ import annotations

import math
from collections import deque

from localrun.snapshot import Percentiles

GROWTH = 1.04
WINDOW_S = 60.0
SLICE_S = 1.0

_SHORTEST_S = 1e-6
_LONGEST_S = 1e5
_PER_LOG = 1 / math.log(GROWTH)


def _bucket(seconds: float) -> int:
    return math.floor(math.log(min(max(seconds, _SHORTEST_S), _LONGEST_S)) * _PER_LOG)


def _middle_s(bucket: int) -> float:
    return float(GROWTH ** (bucket + 0.5))


class LatencyHistogram:
    """Counts by bucket; only buckets in use take memory (at most about 650)."""

    __slots__ = ("count", "counts")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.count = 0

    def add(self, seconds: float, times: int = 1) -> None:
        bucket = _bucket(seconds)
        self.counts[bucket] = self.counts.get(bucket, 0) + times
        self.count += times

    def remove(self, other: LatencyHistogram) -> None:
        """Takes back what was added, bucket by bucket."""
        for bucket, times in other.counts.items():
            left = self.counts[bucket] - times
            if left:
                self.counts[bucket] = left
            else:
                del self.counts[bucket]
        self.count -= other.count

    def quantiles(self, *fractions: float) -> list[float | None]:
        """Seconds at each fraction (ascending, 0 to 1); None without a sample. Nearest rank."""
        found: list[float | None] = []
        ordered = iter(sorted(self.counts.items()))
        bucket, seen = 0, 0
        for fraction in fractions:
            if not self.count:
                found.append(None)
                continue
            rank = max(1, math.ceil(fraction * self.count))
            while seen < rank:
                bucket, times = next(ordered)
                seen += times
            found.append(_middle_s(bucket))
        return found


class LatencyWindow:
    """The durations of the last `WINDOW_S` seconds, forgotten in slices of `SLICE_S`."""

    def __init__(self) -> None:
        self._all = LatencyHistogram()
        self._slices: deque[tuple[int, LatencyHistogram]] = deque()

    def add(self, now_s: float, seconds: float, times: int = 1) -> None:
        """Times that go back a little (two engines' news) fall into the newest slice."""
        number = int(now_s / SLICE_S)
        if not self._slices or number > self._slices[-1][0]:
            self._forget(now_s)
            self._slices.append((number, LatencyHistogram()))
        self._slices[-1][1].add(seconds, times)
        self._all.add(seconds, times)

    def percentiles(self, now_s: float) -> Percentiles:
        self._forget(now_s)
        p50, p95, p99 = self._all.quantiles(0.5, 0.95, 0.99)
        return Percentiles(p50=p50, p95=p95, p99=p99, count=self._all.count)

    def _forget(self, now_s: float) -> None:
        oldest = int((now_s - WINDOW_S) / SLICE_S)
        while self._slices and self._slices[0][0] <= oldest:
            self._all.remove(self._slices.popleft()[1])
