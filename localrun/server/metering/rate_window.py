"""Tokens per second over the last second.

Pure: time is an argument. One per engine and kind of work, and one per request.

Tokens arrive in steps, and a step may be a millisecond or ten seconds long. Counting what fell into the last second
would show a slow model as 0, 4, 0, 4. So every entry knows the time it took, and the rate is that of the entries that
ended in the last second, over the time they cover; between two slow steps, the last one still speaks.

Does not: average over more than a second (that is `tokens / elapsed`, no window needed).
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 1.0


class RateWindow:
    """Entries of the last second, and the newest one for as long as it is the newest."""

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
        if idle_s > WINDOW_S:
            return n_tokens / max(span_s, idle_s) if idle_s <= 2 * span_s else 0.0
        oldest_ended_s, oldest_span_s, _ = self._entries[0]
        began_s = oldest_ended_s - oldest_span_s
        covered_s = ended_s - began_s
        if idle_s > 2 * span_s:
            # Something is overdue: one quick step in an otherwise idle second is not a high rate.
            covered_s = max(covered_s, min(WINDOW_S, now_s - began_s))
        return self._n_tokens / covered_s if covered_s > 0 else 0.0

    def _forget(self, now_s: float) -> None:
        entries = self._entries
        while len(entries) > 1 and entries[0][0] <= now_s - WINDOW_S:
            self._n_tokens -= entries.popleft()[2]
