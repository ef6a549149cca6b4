"""The disk tier: saved segments that survive the process. `disk_record.DiskTier` over a folder of files.

Owner: the engine's main thread calls it; a background thread writes, deletes, notes uses and keeps the bound, in the
order in which that was asked for. A lock guards the index of entries, never held while a file is touched. A read comes
straight from the file, on the caller's thread: milliseconds from the page cache.

How it fails: what is damaged, gone, foreign or refused is a miss. A write that the system refuses turns writing off for
the rest of the process, with one line in the log; a write that finds the disk busy (`BACKLOG_BYTES` waiting) is dropped
and counted. Other processes may write, evict and clear in the same folder at the same time: an entry is known by the
digest of its header, so one that another process put in the place of ours is a miss too. What a survey no longer
finds, or could not be written after all, leaves the index and is told by `take_lost`.

Invariants: `size_bytes` is the sum over the index; an entry's parent was in the index when it was written.
Does not: know the radix tree, or compare tokens (`kv_store.py` does both).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from localrun import kv_folders
from localrun.engine.backend import State
from localrun.engine.cache import kv_disk_format as disk_format
from localrun.engine.cache.background import Background
from localrun.engine.cache.disk_record import DiskRecord
from localrun.engine.cache.kv_disk_bound import KvDiskBound
from localrun.engine.cache.kv_disk_files import KvDiskFiles, now_ns
from localrun.engine.cache.kv_disk_format import Damaged, Header

BACKLOG_BYTES = 256 * 1024**2
CLOSE_TIMEOUT_S = 5.0

# Refusals that say nothing about the next write.
_PASSING = frozenset({errno.ENOENT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})

log = logging.getLogger("localrun.engine")


@dataclass(eq=False)
class _Entry:
    """`data` is there until the file is; `digest` from then on."""

    parent_key: bytes
    start: int
    size_bytes: int
    data: bytes | bytearray | memoryview | None
    digest: bytes = b""


class KvDisk:
    """See the module. `limit_bytes` bounds all models' folders below `root` together.

    `fingerprint` (16 bytes) names everything that changes the meaning of a state. Raises OSError when the folder cannot
    be made.
    """

    def __init__(self, root: Path, *, fingerprint: bytes, about: kv_folders.About, limit_bytes: int) -> None:
        self._files = KvDiskFiles(root, fingerprint, about)
        self.limit_bytes = limit_bytes
        self._bound = KvDiskBound(root, limit_bytes, self._files.free_bytes)
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._touched: dict[bytes, int] = {}
        self._lost: list[bytes] = []
        self._may_write = True
        self._has_told_short = False
        self.size_bytes = 0
        self.n_dropped_writes = 0
        self._background = Background("kv disk", BACKLOG_BYTES)

    @property
    def n_entries(self) -> int:
        return len(self._entries)

    @property
    def may_write(self) -> bool:
        return self._may_write

    @property
    def is_behind(self) -> bool:
        return self._background.is_behind

    # --- asked by the KV store -----------------------------------------------------------------------------------

    def scan(self) -> list[DiskRecord]:
        self._files.delete_abandoned(time.time())
        found = sorted(self._files.headers(), key=lambda found: found[1], reverse=True)
        reached, orphans = _below_their_parents([header for header, _ in found], self.limit_bytes)
        for header in reached:
            record = header.record
            self._add(record.key, _Entry(record.parent_key, record.start, header.file_bytes, None, header.digest))
        for header in orphans:
            self._files.delete(header.record.key)
        return [header.record for header in reached]

    def write(self, record: DiskRecord, data: State) -> bool:
        if not self._may_write:
            return False
        plain = data.data if isinstance(data, np.ndarray) else data
        entry = _Entry(record.parent_key, record.start, len(data) + disk_format.USUAL_HEADER_BYTES, plain)
        with self._lock:
            is_reachable = not record.parent_key or record.parent_key in self._entries
        if is_reachable:
            self._add(record.key, entry)
            if self._background.put(lambda: self._write(record, entry), len(data)):
                return True
            self._forget(record.key, entry)
        self.n_dropped_writes += 1
        return False

    def take_lost(self) -> list[bytes]:
        if not self._lost:
            return []
        with self._lock:
            lost, self._lost = self._lost, []
            return [key for key in lost if key not in self._entries]

    def read(self, key: bytes) -> bytearray | None:
        with self._lock:
            entry = self._entries.get(key)
            waiting = None if entry is None else entry.data
        if entry is None:
            return None
        if waiting is not None:
            return bytearray(waiting)
        data = None
        try:
            data = self._files.get(key, entry.digest)
        except Damaged as damage:
            log.warning("a saved prefix on disk is damaged and was deleted: %s", damage)
            self._background.put(lambda: self._files.delete(key))
        except (OSError, MemoryError):
            pass
        if data is None:
            self._forget(key, entry)
        return data

    def touch(self, key: bytes) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return
            is_first = not self._touched
            self._touched[key] = now_ns(entry.start)
        if is_first:
            self._background.put(self._note_uses)

    def remove(self, key: bytes) -> None:
        with self._lock:
            entry = self._entries.get(key)
        if entry is not None:
            self._forget(key, entry)
            self._background.put(lambda: self._files.delete(key))

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._touched.clear()
            self.size_bytes = 0
        self._background.put(lambda: _clear(self._files.folder))

    def flush(self, deadline_s: float) -> None:
        self._background.flush(deadline_s)

    def close(self) -> None:
        self._background.close(CLOSE_TIMEOUT_S)

    # --- done in the background ----------------------------------------------------------------------------------

    def _write(self, record: DiskRecord, entry: _Entry) -> None:
        data = entry.data
        if not self._is_current(record.key, entry) or data is None:
            return
        try:
            if self._may_write and self._has_room(len(data) + disk_format.USUAL_HEADER_BYTES):
                header = disk_format.pack(record, data, self._fingerprint)
                self._files.put(header, data, record.key, now_ns(record.start))
                self._bound.wrote(len(header) + len(data))
                self._wrote(record.key, entry, header)
                self._touch_ancestors(entry)
                return
        except OSError as error:
            self._refused(error)
        self._lose(record.key, entry)

    def _has_room(self, n_bytes: int) -> bool:
        """Make room by the bound, and forget what had to go or is gone anyway. Raises OSError."""
        has_room, left = self._bound.make_room(n_bytes)
        if left is not None:
            there = {file.key for file in left if file.path.parent == self._files.folder and file.writer_pid is None}
            with self._lock:
                gone = [(key, entry) for key, entry in self._entries.items() if entry.data is None and key not in there]
            for key, entry in gone:
                self._lose(key, entry)
        if not has_room and not self._has_told_short:
            self._has_told_short = True
            log.warning("prefixes are not saved to disk while it is short of space or they are beyond disk_cache_bytes")
        return has_room

    def _refused(self, error: OSError) -> None:
        if error.errno not in _PASSING and self._may_write:
            self._may_write = False
            log.warning("prefixes are no longer saved to disk, because writing there failed: %s", error)

    def _wrote(self, key: bytes, entry: _Entry, header: bytes) -> None:
        with self._lock:
            n_bytes = len(header) + (0 if entry.data is None else len(entry.data))
            if self._entries.get(key) is entry:
                self.size_bytes += n_bytes - entry.size_bytes
            entry.size_bytes = n_bytes
            entry.digest = header[-disk_format.DIGEST_BYTES :]
            entry.data = None

    def _touch_ancestors(self, entry: _Entry) -> None:
        """Whoever uses a segment uses those before it; they must not be evicted before it."""
        parent_key = entry.parent_key
        while parent_key:
            with self._lock:
                parent = self._entries.get(parent_key)
            if parent is None:
                return
            if parent.data is None:
                with contextlib.suppress(OSError):
                    self._files.touch(parent_key, now_ns(parent.start))
            parent_key = parent.parent_key

    def _note_uses(self) -> None:
        with self._lock:
            touched, self._touched = self._touched, {}
        for key, used_at_ns in touched.items():
            with contextlib.suppress(OSError):
                self._files.touch(key, used_at_ns)

    # --- the index -----------------------------------------------------------------------------------------------

    def _is_current(self, key: bytes, entry: _Entry) -> bool:
        with self._lock:
            return self._entries.get(key) is entry

    def _add(self, key: bytes, entry: _Entry) -> None:
        with self._lock:
            before = self._entries.get(key)
            self.size_bytes += entry.size_bytes - (before.size_bytes if before is not None else 0)
            self._entries[key] = entry

    def _forget(self, key: bytes, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(key) is entry:
                del self._entries[key]
                self._touched.pop(key, None)
                self.size_bytes -= entry.size_bytes

    def _lose(self, key: bytes, entry: _Entry) -> None:
        self._forget(key, entry)
        with self._lock:
            self._lost.append(key)


def _clear(folder: Path) -> None:
    kv_folders.clear(folder)


def _below_their_parents(headers: list[Header], limit_bytes: int) -> tuple[list[Header], list[Header]]:
    """The headers that hang together from a root, each after its parent, and those that do not. One of more than
    `limit_bytes` was never written here, and is not worth the memory of reading it."""
    children: dict[bytes, list[Header]] = {}
    orphans = []
    for header in headers:
        if header.file_bytes > limit_bytes:
            orphans.append(header)
        else:
            children.setdefault(header.record.parent_key, []).append(header)
    reached: list[Header] = []
    level = children.pop(b"", [])
    while level:
        reached += level
        level = [child for header in level for child in children.pop(header.record.key, [])]
    return reached, orphans + [header for rest in children.values() for header in rest]
