"""When to try again: backoff with jitter, and what a server's Retry-After asks for. Pure.

Full jitter (a wait drawn evenly from 0 to the exponential bound), so that many connections that failed together do not
come back together.
"""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

# What a server answers when it is busy or broken, not when the request is wrong.
PASSING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})


def backoff_s(n_failures: int, *, base_s: float, cap_s: float, draw: float) -> float:
    """The wait after the n-th failure in a row (from 1). `draw` is a random number from 0 to 1."""
    bound_s = min(cap_s, base_s * 2.0 ** min(n_failures - 1, 60))
    return bound_s * draw


def retry_after_s(header: str | None, *, now: datetime) -> float | None:
    """The seconds that a Retry-After header asks for (RFC 9110, 10.2.3: seconds or a date); None if it says nothing."""
    if not header:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - now).total_seconds())
