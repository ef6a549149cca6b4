"""When requests arrive in an open loop: by a clock of their own, not when the server is ready for more.

A closed loop sends the next request when an answer is complete, so a slow server is asked less, and its queue is never
seen.

Pure.
"""

from __future__ import annotations

import random


def arrivals_s(*, rate_per_s: float, seconds: float, burstiness: float = 1.0, seed: int) -> list[float]:
    """Times in [0, seconds), ascending. Gaps are Gamma distributed with mean 1 / rate and shape `burstiness`.

    A shape of 1 makes a Poisson process; below 1 arrivals come in bursts, above they get regular.
    """
    chosen = random.Random(seed)
    at_s = 0.0
    times: list[float] = []
    while True:
        at_s += chosen.gammavariate(burstiness, 1 / (rate_per_s * burstiness))
        if at_s >= seconds:
            return times
        times.append(at_s)
