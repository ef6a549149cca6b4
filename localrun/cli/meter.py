"""How fast an answer comes, as seen by the one who reads it.

Pure: time is an argument. A piece of a stream is nearly always one token; the daemon's own counts come with the last.
"""

from __future__ import annotations

from collections import deque

# The rate is that of the last two seconds; over fewer pieces than this it would jump about.
RATE_WINDOW_S = 2.0
RATE_MIN_PIECES = 5


class StreamMeter:
    """Counts pieces. All times are of one monotonic clock; `started_at_s` is when the request was sent."""

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._arrivals_s: deque[float] = deque()
        self.pieces = 0
        self.ttft_s: float | None = None

    def add(self, now_s: float) -> None:
        """A piece with text came."""
        if self.ttft_s is None:
            self.ttft_s = now_s - self._started_at_s
        self.pieces += 1
        self._arrivals_s.append(now_s)

    def pieces_per_s(self, now_s: float) -> float | None:
        """The rate of the last two seconds; None while there are too few pieces to tell."""
        while self._arrivals_s and now_s - self._arrivals_s[0] > RATE_WINDOW_S:
            self._arrivals_s.popleft()
        if self.pieces < RATE_MIN_PIECES:
            return None
        if not self._arrivals_s:
            return 0.0
        span_s = now_s - self._arrivals_s[0]
        return (len(self._arrivals_s) - 1) / span_s if span_s > 0 else None

    def line(self, now_s: float) -> str:
        """One line for a person who watches."""
        if self.ttft_s is None:
            return f"waiting for the first token, {now_s - self._started_at_s:.1f} s"
        rate = self.pieces_per_s(now_s)
        shown_rate = "..." if rate is None else f"{rate:.1f}"
        return f"{shown_rate} tokens/s, {self.pieces} tokens, first after {self.ttft_s:.2f} s"
