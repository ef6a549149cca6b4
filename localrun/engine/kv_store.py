"""Saved sequence states in memory, oldest out first. Pure bookkeeping over bytes.

Invariant: the sizes add up to `size_bytes`, which never exceeds `limit_bytes`.
Does not: know tokens (the prefix tree does) or make states (the backend does). There is no disk tier yet.
"""

from __future__ import annotations

from collections import OrderedDict


class KvStore:
    """State blobs by number, least recently used first. `limit_bytes` 0 stores nothing."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._states: OrderedDict[int, bytearray] = OrderedDict()
        self._next_entry = 0

    def __len__(self) -> int:
        return len(self._states)

    def put(self, state: bytearray) -> tuple[int | None, list[int]]:
        """Keep `state`. Returns its entry (None if it alone is over the limit) and the entries that had to go."""
        if len(state) > self.limit_bytes:
            return None, []
        evicted = []
        while self.size_bytes + len(state) > self.limit_bytes:
            oldest = next(iter(self._states))
            self.drop(oldest)
            evicted.append(oldest)
        entry = self._next_entry
        self._next_entry += 1
        self._states[entry] = state
        self.size_bytes += len(state)
        return entry, evicted

    def get(self, entry: int) -> bytearray:
        """The state of an entry, which becomes the most recently used. Raises KeyError."""
        self._states.move_to_end(entry)
        return self._states[entry]

    def drop(self, entry: int) -> None:
        """Forget an entry. Raises KeyError."""
        self.size_bytes -= len(self._states.pop(entry))

    def check_integrity(self) -> None:
        """Raises AssertionError if the books are wrong."""
        assert self.size_bytes == sum(map(len, self._states.values())), "size_bytes differs from the states"
        assert self.size_bytes <= self.limit_bytes, "over the limit"
