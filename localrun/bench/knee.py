"""Where more streams stop paying.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

# Less than this much more per doubling of the streams is no gain: every stream gets about half as fast.
LEAST_GAIN = 0.10


def knee(rates: Mapping[int, float]) -> int | None:
    """The first number of streams from which the step to the next one gains less than LEAST_GAIN per doubling.

    `rates` are aggregate tokens per second by number of streams. None when every step gains more: the knee lies beyond.
    """
    for fewer, more in pairwise(sorted(rates)):
        if gain_per_doubling(fewer, rates[fewer], more, rates[more]) < LEAST_GAIN:
            return fewer
    return None


def gain_per_doubling(fewer: int, rate_of_fewer: float, more: int, rate_of_more: float) -> float:
    """0.0 is the same rate, 1.0 is twice the rate for twice the streams."""
    return math.pow(rate_of_more / rate_of_fewer, 1 / math.log2(more / fewer)) - 1
