"""How many replicas an app should have, by the seconds of work that wait: two prompts of 60,000 tokens are more work
than twenty of 60.

More when what waits has been too much for some seconds, at most twice as many at a time; one less when the others could
have done it for ten minutes. As long as replicas are starting there is nothing to learn from how much waits, so nothing
is added: loading a model may take minutes.

Pure: the time is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

UP_AFTER_S = 15.0
DOWN_AFTER_S = 600.0
# What an app is scaled for: so long a new request waits for its first token where it waits.
TARGET_WAIT_S = 2.0


class Scale(msgspec.Struct, frozen=True):
    """Between how many replicas. With none at least, the first request after a pause waits for one to start."""

    least: int
    most: int

    def within(self, n: int) -> int:
        return min(max(n, self.least), self.most)


class Load(NamedTuple):
    """Of one replica. `wait_s` is how long what waits there last is expected to wait, None where nobody knows."""

    n_slots: int
    n_running: int
    n_queued: int
    wait_s: float | None


class Scaler:
    """Of one app: what it remembers is since when."""

    def __init__(self) -> None:
        self._n = -1
        self._behind_since_s: float | None = None
        self._idle_since_s: float | None = None

    def wanted(self, scale: Scale, n: int, loads: Sequence[Load], now_s: float) -> int:
        """How many there should be, of `n` now; `loads` are of those that are ready."""
        if n != self._n:
            self._n, self._behind_since_s, self._idle_since_s = n, None, None
        if n != scale.within(n):
            return scale.within(n)
        wait_s = _mean_wait_s(loads)
        is_behind = len(loads) >= n > 0 and wait_s > TARGET_WAIT_S
        self._behind_since_s = (self._behind_since_s or now_s) if is_behind else None
        is_idle = n > scale.least and _others_suffice(n, loads)
        self._idle_since_s = (self._idle_since_s or now_s) if is_idle else None
        if self._behind_since_s is not None and now_s - self._behind_since_s >= UP_AFTER_S:
            return scale.within(min(2 * n, math.ceil(n * wait_s / TARGET_WAIT_S)))
        if self._idle_since_s is not None and now_s - self._idle_since_s >= DOWN_AFTER_S:
            return n - 1
        return n


def _mean_wait_s(loads: Sequence[Load]) -> float:
    """Over the replicas: what waits could be spread. A queue that nobody can predict asks for twice as many."""
    waits = [(2 * TARGET_WAIT_S if one.wait_s is None else one.wait_s) if one.n_queued else 0.0 for one in loads]
    return sum(waits) / len(waits) if waits else 0.0


def _others_suffice(n: int, loads: Sequence[Load]) -> bool:
    """Whether one less could do what is done. One that never became ready is not missed, as long as none waits; but the
    first one is being waited for."""
    if not loads or any(one.n_queued for one in loads):
        return False
    n_slots = sum(one.n_slots for one in loads)
    if len(loads) >= n:
        n_slots -= max((one.n_slots for one in loads), default=0)
    return sum(one.n_running for one in loads) <= n_slots
