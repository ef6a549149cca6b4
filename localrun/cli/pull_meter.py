"""How far a download is, as one line for a person.

Pure: time is an argument. What was on disk before counts as done, but not towards the rate; no number goes backwards,
whatever the daemon says.

Does not: print.
"""

from __future__ import annotations

from collections import deque

from localrun.cli.columns import duration, size
from localrun.client import PullPiece

RATE_WINDOW_S = 8.0
# A rate over less than this jumps about.
RATE_MIN_S = 0.5
BAR_CHARS = 24


class PullMeter:
    """Fed with every piece of a pull. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._totals: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, piece: PullPiece, now_s: float) -> None:
        """A piece came. Those without a size change nothing."""
        if not piece.total:
            return
        key = piece.digest or piece.status
        is_first = key not in self._totals
        self._totals[key] = max(self._totals.get(key, 0), piece.total)
        self._done[key] = max(self._done.get(key, 0), min(piece.completed, self._totals[key]))
        if is_first or (not self._samples and piece.completed):
            self._samples.clear()
        self._samples.append((now_s, self.done_bytes))
        while len(self._samples) > 2 and now_s - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()

    @property
    def total_bytes(self) -> int:
        """Of all files that are known yet."""
        return sum(self._totals.values())

    @property
    def done_bytes(self) -> int:
        return sum(self._done.values())

    @property
    def percent(self) -> int:
        """Rounded down, so that 100 means all of it."""
        return self.done_bytes * 100 // self.total_bytes if self.total_bytes else 0

    def bytes_per_s(self, now_s: float) -> float | None:
        """The rate of the last seconds; None while it cannot be told."""
        if len(self._samples) < 2 or now_s - self._samples[0][0] < RATE_MIN_S:
            return None
        return (self._samples[-1][1] - self._samples[0][1]) / (now_s - self._samples[0][0])

    def line(self, now_s: float) -> str:
        """Bar, bytes, rate and time left."""
        filled = BAR_CHARS * self.percent // 100
        bar = "#" * filled + "." * (BAR_CHARS - filled)
        parts = [f"{self.percent:3d}% [{bar}] {size(self.done_bytes)} / {size(self.total_bytes)}"]
        rate = self.bytes_per_s(now_s)
        if rate is not None and self.done_bytes < self.total_bytes:
            parts.append(f"{size(rate)}/s")
            if rate > 0:
                parts.append(f"{_left((self.total_bytes - self.done_bytes) / rate)} left")
        return "  ".join(parts)


def _left(seconds: float) -> str:
    """Whole seconds: more would only flicker."""
    return f"{max(1, round(seconds))} s" if seconds < 59.5 else duration(seconds)
