"""A disk tier in memory, as strict as the real one: it refuses what comes without its parent, and within its limit the
entries used longest ago make room, beginnings last."""

from __future__ import annotations

from localrun.engine.backend import State
from localrun.engine.cache.tree import DiskRecord


class MemoryDisk:
    """`records` and `data` are what is on the disk, in order of writing; tests take entries out to let them vanish."""

    def __init__(self, limit_bytes: int = 1 << 60) -> None:
        self.limit_bytes = limit_bytes
        self.lost: list[bytes] = []
        self.records: dict[bytes, DiskRecord] = {}
        self.data: dict[bytes, bytes] = {}
        self.may_write = True
        self.is_behind = False
        self.touched: list[bytes] = []
        self.calls: list[str] = []

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.data.values()))

    @property
    def n_entries(self) -> int:
        return len(self.data)

    def scan(self) -> list[DiskRecord]:
        return list(self.records.values())

    def write(self, record: DiskRecord, data: State) -> bool:
        if not self.may_write or (record.parent_key and record.parent_key not in self.records):
            return False
        self.remove(record.key)
        self.records[record.key] = record
        self.data[record.key] = bytes(data)
        while self.size_bytes > self.limit_bytes:
            self.lose(next(iter(self.data)))
        parent = self.records.get(record.parent_key)
        while parent is not None:
            self._renew(parent.key)
            parent = self.records.get(parent.parent_key)
        return True

    def lose(self, key: bytes) -> None:
        """As if the bound had evicted it."""
        self.remove(key)
        self.lost.append(key)

    def take_lost(self) -> list[bytes]:
        lost, self.lost = self.lost, []
        return [key for key in lost if key not in self.data]

    def read(self, key: bytes) -> bytearray | None:
        return bytearray(self.data[key]) if key in self.data else None

    def touch(self, key: bytes) -> None:
        self.touched.append(key)
        self._renew(key)

    def _renew(self, key: bytes) -> None:
        if key in self.data:
            self.data[key] = self.data.pop(key)

    def remove(self, key: bytes) -> None:
        self.records.pop(key, None)
        self.data.pop(key, None)

    def clear(self) -> None:
        self.records.clear()
        self.data.clear()

    def flush(self, deadline_s: float) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")
