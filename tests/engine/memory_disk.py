"""A disk tier in memory, as strict as the real one: what is written without its parent, or when it is full, is gone."""

from __future__ import annotations

from localrun.engine.backend import State
from localrun.engine.disk_record import DiskRecord


class MemoryDisk:
    """`records` and `data` are what is on the disk, in order of writing; tests take entries out to let them vanish."""

    def __init__(self) -> None:
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

    def write(self, record: DiskRecord, data: State) -> None:
        if self.may_write and (not record.parent_key or record.parent_key in self.records):
            self.records[record.key] = record
            self.data[record.key] = bytes(data)

    def read(self, key: bytes) -> bytearray | None:
        return bytearray(self.data[key]) if key in self.data else None

    def touch(self, key: bytes) -> None:
        self.touched.append(key)

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
