"""Numbers over a stretch of time: tokens per second, and percentiles of durations.

Pure: time is an argument. Memory is bounded whatever the load, and adding costs one logarithm at most.
Does not: export to Prometheus (telemetry.py does, with fixed buckets that can be summed over machines).
"""

from __future__ import annotations

import math
from collections import deque

from localrun.snapshot import Percentiles

RATE_WINDOW_S = 1.0


class RateWindow:
    """Tokens per second over the last second, of one engine and kind of work, or of one request.

    Tokens arrive in steps, and a step may be a millisecond or ten seconds long. Counting what fell into the last second
    would show a slow model as 0, 4, 0, 4. So every entry knows the time it took, and the rate is that of the entries
    that ended in the last second, over the time they cover; between two slow steps, the last one still speaks.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[float, float, int]] = deque()  # (ended, span, tokens), oldest first
        self._n_tokens = 0

    def add(self, now_s: float, span_s: float, n_tokens: int) -> None:
        """`n_tokens` came at `now_s`; making them took `span_s`, the time since the ones before."""
        self._entries.append((now_s, span_s, n_tokens))
        self._n_tokens += n_tokens
        self._forget(now_s)

    def per_s(self, now_s: float) -> float:
        """Tokens per second. 0 when nothing came for a second and for twice the time that the last entry took."""
        self._forget(now_s)
        if not self._entries:
            return 0.0
        ended_s, span_s, n_tokens = self._entries[-1]
        idle_s = now_s - ended_s
        if idle_s > RATE_WINDOW_S:
            return n_tokens / max(span_s, idle_s) if idle_s <= 2 * span_s else 0.0
        oldest_ended_s, oldest_span_s, _ = self._entries[0]
        began_s = oldest_ended_s - oldest_span_s
        covered_s = ended_s - began_s
        if idle_s > 2 * span_s:
            # Something is overdue: one quick step in an otherwise idle second is not a high rate.
            covered_s = max(covered_s, min(RATE_WINDOW_S, now_s - began_s))
        return self._n_tokens / covered_s if covered_s > 0 else 0.0

    def _forget(self, now_s: float) -> None:
        entries = self._entries
        while len(entries) > 1 and entries[0][0] <= now_s - RATE_WINDOW_S:
            self._n_tokens -= entries.popleft()[2]


GROWTH = 1.04
LATENCY_WINDOW_S = 60.0
SLICE_S = 1.0

_SHORTEST_S = 1e-6
_LONGEST_S = 1e5
_PER_LOG = 1 / math.log(GROWTH)


def _bucket(seconds: float) -> int:
    return math.floor(math.log(min(max(seconds, _SHORTEST_S), _LONGEST_S)) * _PER_LOG)


def _middle_s(bucket: int) -> float:
    return float(GROWTH ** (bucket + 0.5))


class LatencyHistogram:
    """Percentiles of all durations that were added.

    They fall into buckets whose bounds grow by `GROWTH`, so a percentile is right to half of that (2 %). Only buckets
    in use take memory (at most about 650).
    """

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
        oldest = int((now_s - LATENCY_WINDOW_S) / SLICE_S)
        while self._slices and self._slices[0][0] <= oldest:
            self._all.remove(self._slices.popleft()[1])
