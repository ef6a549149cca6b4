"""Saved sequence states in memory, oldest out first. Pure bookkeeping over bytes.

Invariant: the sizes add up to `size_bytes`, which never exceeds `limit_bytes`.
Does not: know tokens (the prefix tree does) or make states (the backend does). There is no disk tier yet.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SavedState:
    """A sequence out of its cells: the backend's bytes, and the order of positions in them (`KvCells.saved_order`)."""

    data: bytearray
    order: NDArray[np.int32]

    @property
    def size_bytes(self) -> int:
        return len(self.data) + self.order.nbytes


class KvStore:
    """States by number, least recently used first. `limit_bytes` 0 stores nothing."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._states: OrderedDict[int, SavedState] = OrderedDict()
        self._next_entry = 0

    def __len__(self) -> int:
        return len(self._states)

    def put(self, state: SavedState) -> tuple[int, list[int]]:
        """Keep `state`. Returns its entry and the entries that had to go. Raises ValueError if it alone is over the
        limit."""
        if state.size_bytes > self.limit_bytes:
            raise ValueError(f"a state of {state.size_bytes} bytes in a store of {self.limit_bytes}")
        evicted = []
        while self.size_bytes + state.size_bytes > self.limit_bytes:
            oldest = next(iter(self._states))
            self.drop(oldest)
            evicted.append(oldest)
        entry = self._next_entry
        self._next_entry += 1
        self._states[entry] = state
        self.size_bytes += state.size_bytes
        return entry, evicted

    def get(self, entry: int) -> SavedState:
        """The state of an entry, which becomes the most recently used. Raises KeyError."""
        self._states.move_to_end(entry)
        return self._states[entry]

    def drop(self, entry: int) -> None:
        """Forget an entry. Raises KeyError."""
        self.size_bytes -= self._states.pop(entry).size_bytes

    def check_integrity(self) -> None:
        """Raises AssertionError if the books are wrong."""
        sizes_bytes = [state.size_bytes for state in self._states.values()]
        assert self.size_bytes == sum(sizes_bytes), "size_bytes differs from the states"
        assert self.size_bytes <= self.limit_bytes, "over the limit"
