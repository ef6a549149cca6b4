"""Percentiles, and the names under which they are reported.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

REPORTED = (50, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks, so that 50 is the usual median. `values` must not be empty.

    Definition 7 of Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996), which is numpy's default.
    """
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = math.ceil(rank)
    # Written so that equal neighbours give exactly their value, and never anything outside them.
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summary(name: str, values_s: Iterable[float]) -> dict[str, float]:
    """`<name>_p50_s`, `_p95_s`, `_p99_s` and `_max_s` of seconds; nothing without values."""
    values = list(values_s)
    if not values:
        return {}
    reported = {f"{name}_p{percent}_s": percentile(values, percent) for percent in REPORTED}
    return {**reported, f"{name}_max_s": max(values)}
