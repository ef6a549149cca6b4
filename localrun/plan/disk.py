"""The cache on disk, of which only the sizes are kept: reading takes virtual time, and writing that of a thread beside
the steps, which is none. What was used longest ago goes first.

Does not: fall behind, or fail.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

from localrun.engine.backend import State
from localrun.engine.cache.tree import DiskRecord
from localrun.plan.clock import Account, VirtualClock


class SimDisk:
    """A `DiskTier`, from which a byte is read in `byte_s`."""

    may_write = True
    is_behind = False

    def __init__(self, limit_bytes: int, byte_s: float, clock: VirtualClock) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._byte_s, self._clock = byte_s, clock
        self._entries: OrderedDict[bytes, State] = OrderedDict()
        self.lost: list[bytes] = []

    @property
    def n_entries(self) -> int:
        return len(self._entries)

    def scan(self) -> list[DiskRecord]:
        return []

    def write(self, record: DiskRecord, data: State) -> bool:
        if len(data) > self.limit_bytes or (record.parent_key and record.parent_key not in self._entries):
            return False
        self.remove(record.key)
        self._entries[record.key] = data
        self.size_bytes += len(data)
        while self.size_bytes > self.limit_bytes:
            oldest = next(iter(self._entries))
            self.remove(oldest)
            self.lost.append(oldest)
        return True

    def take_lost(self) -> list[bytes]:
        lost, self.lost = self.lost, []
        return lost

    def read(self, key: bytes) -> bytearray | None:
        data = self._entries.get(key)
        if data is not None:
            self._clock.spend(self._byte_s * len(data), Account.COPIES)
        return cast("bytearray | None", data)  # as long as one, and without its memory

    def touch(self, key: bytes) -> None:
        if key in self._entries:
            self._entries.move_to_end(key)

    def remove(self, key: bytes) -> None:
        data = self._entries.pop(key, None)
        if data is not None:
            self.size_bytes -= len(data)

    def clear(self) -> None:
        self._entries.clear()
        self.size_bytes = 0

    def flush(self, deadline_s: float) -> None:
        pass

    def close(self) -> None:
        pass
