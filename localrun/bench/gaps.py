"""The silences between pieces of a stream.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise


def gaps_s(arrivals_s: Sequence[float]) -> list[float]:
    """Seconds between neighbouring arrivals: one less than there are arrivals."""
    return [later - earlier for earlier, later in pairwise(arrivals_s)]


def gaps_touching_s(arrivals_s: Sequence[float], start_s: float, end_s: float) -> list[float]:
    """The gaps that lie at least partly within [start_s, end_s], each in its full length.

    A gap belongs to what happened during any part of it: a stall that begins before a window ends is that window's.
    """
    return [later - earlier for earlier, later in pairwise(arrivals_s) if later > start_s and earlier < end_s]


def longest_s(gaps: Iterable[float]) -> float:
    """0 without gaps."""
    return max(gaps, default=0.0)
