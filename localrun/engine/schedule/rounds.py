"""Which set of adapters a step computes with, where running requests have several. Pure; time is an argument.

A native call has one set, and a change of it has llama.cpp build its graphs anew (`budget.py` learns what that costs).
So the rows of a step are those of one set, as many as are due, and the sets take turns: in a *round* each of them has
one step. Between two steps of a stream every other set has at most one, so nobody waits for more than a round, and if
rounds take longer than the streams' target, all intervals grow alike. A single set's step is a round of its own.

Does not: know requests or rows, or choose among prompts of the same set (`policy.py`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable

# Sets with the longest memory of their last turn; of the others it is forgotten, and they go first.
_MOST_SETS = 256
# Rounds that say how long the next one will take: few, because streams come and go.
_N_RECENT = 8


class TurnOrder:
    """Whose turn it is: the set's whose last one is the longest ago, and among new ones the first one's."""

    def __init__(self) -> None:
        self._turns: dict[bytes, int] = {}
        self._n_turns = 0

    def order(self, groups: Iterable[bytes]) -> list[bytes]:
        """The sets with these names, in the order of their next turns."""
        return sorted(groups, key=lambda group: self._turns.get(group, 0))

    def took(self, group: bytes) -> None:
        """A set had its turn."""
        self._n_turns += 1
        self._turns.pop(group, None)
        self._turns[group] = self._n_turns
        if len(self._turns) > _MOST_SETS:
            del self._turns[next(iter(self._turns))]


class AdapterRounds:
    """See the module. The last whole round ended at `ended_at_s`."""

    def __init__(self) -> None:
        self.ended_at_s = -math.inf
        self._ring = TurnOrder()
        self._left: list[bytes] = []
        self._so_far_s = 0.0
        self._has_drafts = False
        self._recent_s: deque[float] = deque(maxlen=_N_RECENT)

    @property
    def usual_s(self) -> float:
        """How long a round without drafts takes: the median of the latest; 0 before the first one."""
        return statistics.median_low(self._recent_s) if self._recent_s else 0.0

    @property
    def long_s(self) -> float:
        """What such a round seldom exceeds: the longest of the latest but for one, which may have met a busy core."""
        return sorted(self._recent_s)[-2] if len(self._recent_s) > 1 else self.usual_s

    def next(self, groups: Collection[bytes]) -> bytes:
        """The set whose turn it is, of those that have something to compute."""
        return next((group for group in self._left if group in groups), self._ring.order(groups)[0])

    def is_open(self, groups: Collection[bytes]) -> bool:
        """Whether some of these sets still have their step of the round under way."""
        return any(group in groups for group in self._left)

    def note_only(self, group: bytes, step_s: float, ended_at_s: float, *, has_drafts: bool) -> float:
        """The only set that is left had its step, which is a round. Returns how long it took."""
        self._ring.took(group)
        self._left = []
        self._so_far_s, self._has_drafts = step_s, has_drafts
        return self._end(ended_at_s)

    def note(
        self, group: bytes, groups: Collection[bytes], step_s: float, ended_at_s: float, *, has_drafts: bool
    ) -> float | None:
        """A set had its step; `groups` are those that will have something to compute now. Returns how long the round
        took if that was the last of it."""
        if group not in self._left:
            self._left = self._ring.order(dict.fromkeys([group, *groups]))
            self._so_far_s, self._has_drafts = 0.0, False
        self._so_far_s += step_s
        self._has_drafts |= has_drafts
        self._ring.took(group)
        self._left = [other for other in self._left if other in groups and other != group]
        return None if self._left else self._end(ended_at_s)

    def _end(self, ended_at_s: float) -> float:
        # Rounds with drafts take several times as long. Beside prompts there are none, so they say nothing of those.
        if not self._has_drafts:
            self._recent_s.append(self._so_far_s)
        self.ended_at_s = ended_at_s
        return self._so_far_s
