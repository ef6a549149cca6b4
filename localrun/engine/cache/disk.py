"""The disk tier: saved blocks that survive the process. `tiers.DiskTier` over a folder of files.

Owner: the engine's main thread calls it. A background thread writes, deletes, notes uses and enforces the size limit,
in the order of the calls. A lock guards the index of entries and is never held while a file is touched. Reads go
straight to the file, on the caller's thread: milliseconds from the page cache.

How it fails: damaged, missing, foreign or refused entries are misses. If the system refuses a write, writing is off for
the rest of the process, with one line in the log. A write that finds the disk busy (`BACKLOG_BYTES` waiting) is dropped
and counted. Other processes may write, evict and clear in the same folder at the same time. An entry is identified by
the digest of its header, so if another process has put its own entry in place of ours, that is a miss too. Entries that
a survey no longer finds, or that could not be written after all, leave the index and are reported by `take_lost`.

Invariants: `size_bytes` and `n_entries` are those of the index; an entry's parent was in the index when it was written.
Does not: know the radix tree, or compare tokens (`tree.py` and `tiers.py` do).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from localrun import kv_folders
from localrun.engine.backend import Backend, State
from localrun.engine.cache.disk_files import (
    DIGEST_BYTES,
    USUAL_HEADER_BYTES,
    DamagedEntry,
    EntryHeader,
    KvDiskFiles,
    fingerprint,
    now_ns,
    pack,
)
from localrun.engine.cache.tree import DiskRecord
from localrun.kv_folders import About, SavedFile
from localrun.wire import Open

log = logging.getLogger("localrun.engine")


class WriterThread:
    """One thread that runs jobs in order, beside the step loop.

    The queue is bounded in bytes: a job with data is refused if the data of earlier jobs take too much memory. So a
    slow disk never holds up a step and never fills memory.

    Invariants: jobs run one at a time, in the order of `put`; a job that raises is logged, and the next one runs. The
    thread never keeps the process from ending.
    Does not: know what the jobs do.

    Starts its thread at once. All methods may be called from any thread but its own.
    """

    def __init__(self, name: str, backlog_bytes: int) -> None:
        self._backlog_bytes = backlog_bytes
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()
        self._waiting_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], object], n_bytes: int = 0) -> bool:
        """Queue a job. False if it was refused, because its `n_bytes` are too much on top of what is queued. A job
        without bytes is always accepted, and so is any job while the thread is not behind."""
        with self._changed:
            is_too_much = n_bytes and self.is_behind and self._waiting_bytes + n_bytes > self._backlog_bytes
            if is_too_much or self._is_closed:
                return False
            self._jobs.append((job, n_bytes))
            self._waiting_bytes += n_bytes
            self._changed.notify_all()
        return True

    @property
    def is_behind(self) -> bool:
        """Whether the backlog is more than half full: a job with data may be refused."""
        return self._waiting_bytes > self._backlog_bytes // 2

    def flush(self, deadline_s: float) -> bool:
        """Wait until all jobs are done, at most `deadline_s`. Returns whether they are."""
        done = threading.Event()
        return self.put(done.set) and done.wait(deadline_s)

    def close(self, deadline_s: float) -> None:
        """Drop queued jobs, and give the running one `deadline_s` to end."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(deadline_s)

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            with self._changed:
                while not self._jobs and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                job, n_bytes = self._jobs.popleft()
            try:
                job()
            except Exception:
                log.exception("a background job failed")
            # The job may hold megabytes, and the next one may come much later.
            del job
            with self._changed:
                self._waiting_bytes -= n_bytes


RESERVE_BYTES = 1024**3
SURVEY_EVERY_BYTES = 256 * 1024**2
# Everybody waits for a thread that computes and has lost its processor, and nobody for the disk. With a niceness of 19,
# what takes 2.5 s beside two threads that compute was not half written after 20 s.
NICENESS = 5
# Small blocks have a cost per file: the scan at start reads every header of a model.
MAX_FILES = 20_000
# Room is made for several blocks at once, because a survey looks at every file.
_SLACK_PART = 32


class KvDiskBound:
    """How much disk space all models' saved state may take together, and which files go when it is too much.

    Called by the background thread of one engine; other engines work on the same folders at the same time, so what is
    known is a survey plus one's own writes since, and a new survey comes before anything is deleted. Least recently
    used goes first, whosever it is. The file system keeps `RESERVE_BYTES` free for others, whatever the limit says.

    Invariant: nothing is deleted while the limits hold.
    Does not: follow what other processes write between two surveys; they may overshoot by `SURVEY_EVERY_BYTES` each.

    `free_bytes` asks the file system and may raise OSError.
    """

    def __init__(self, root: Path, limit_bytes: int, free_bytes: Callable[[], int]) -> None:
        self._root = root
        self._limit_bytes = limit_bytes
        self._free_bytes = free_bytes
        self._used_bytes = 0
        self._n_files = 0
        self._unseen_bytes = SURVEY_EVERY_BYTES

    def make_room(self, n_bytes: int) -> tuple[bool, list[SavedFile] | None]:
        """Delete as much as a new file of `n_bytes` needs. Returns whether it may be written and, if a survey was
        needed, all files that are left. Raises OSError if the file system does not answer."""
        if n_bytes > self._limit_bytes:
            return False, None
        files: list[SavedFile] | None = None
        if self._unseen_bytes >= SURVEY_EVERY_BYTES or not self._fits(n_bytes):
            files = [file for folder in kv_folders.survey(self._root) for file in folder.files]
            self._used_bytes = sum(file.size_bytes for file in files)
            self._n_files = len(files)
            self._unseen_bytes = 0
            if not self._fits(n_bytes):
                files = self._evict(files, n_bytes)
        return self._fits(n_bytes), files

    def wrote(self, n_bytes: int) -> None:
        """Count a file that was added."""
        self._used_bytes += n_bytes
        self._unseen_bytes += n_bytes
        self._n_files += 1

    def _fits(self, n_bytes: int, slack_bytes: int = 0, slack_files: int = 0) -> bool:
        return (
            self._used_bytes + n_bytes + slack_bytes <= self._limit_bytes
            and self._n_files + 1 + slack_files <= MAX_FILES
            and self._free_bytes() - n_bytes - slack_bytes >= RESERVE_BYTES
        )

    def _evict(self, files: list[SavedFile], n_bytes: int) -> list[SavedFile]:
        """Returns the files that are left."""
        left = []
        slack_bytes = min(self._limit_bytes // _SLACK_PART, self._limit_bytes - n_bytes)
        for file in sorted(files, key=lambda file: file.used_at_ns):
            is_enough = self._fits(n_bytes, slack_bytes, MAX_FILES // _SLACK_PART)
            if is_enough or file.writer_pid is not None or not kv_folders.delete(file.path):
                left.append(file)
            else:
                self._used_bytes -= file.size_bytes
                self._n_files -= 1
        return left


BACKLOG_BYTES = 256 * 1024**2
CLOSE_TIMEOUT_S = 5.0

# Refusals that say nothing about the next write.
_PASSING = frozenset({errno.ENOENT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})


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
        self.folder = self._files.folder
        self.limit_bytes = limit_bytes
        self._bound = KvDiskBound(root, limit_bytes, self._files.free_bytes)
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._touched: dict[bytes, int] = {}
        self.lost: list[bytes] = []
        self.may_write = True
        self._has_told_short = False
        self.n_entries = self.size_bytes = 0
        self.n_dropped_writes = 0
        self._background = WriterThread("kv disk", BACKLOG_BYTES)

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
        if not self.may_write:
            return False
        plain = data.data if isinstance(data, np.ndarray) else data
        entry = _Entry(record.parent_key, record.start, len(data) + USUAL_HEADER_BYTES, plain)
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
        with self._lock:
            lost, self.lost = self.lost, []
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
        except DamagedEntry as damage:
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
            self.n_entries = self.size_bytes = 0
        self._background.put(lambda: kv_folders.clear(self.folder))

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
            if self.may_write and self._has_room(len(data) + USUAL_HEADER_BYTES):
                header = pack(record, data, self._fingerprint)
                self._files.put(header, data, record.key, now_ns(record.start))
                self._bound.wrote(len(header) + len(data))
                self._wrote(record.key, entry, header)
                self._touch_ancestors(entry)
                return
        except OSError as error:
            self._refused(error)
        self._lose(record.key, entry)

    def _has_room(self, n_bytes: int) -> bool:
        """Make room within the limit, and forget entries whose files were deleted or are gone. Raises OSError."""
        has_room, left = self._bound.make_room(n_bytes)
        if left is not None:
            there = {file.key for file in left if file.path.parent == self.folder and file.writer_pid is None}
            with self._lock:
                gone = [(key, entry) for key, entry in self._entries.items() if entry.data is None and key not in there]
            for key, entry in gone:
                self._lose(key, entry)
        if not has_room and not self._has_told_short:
            self._has_told_short = True
            log.warning("prefixes are not saved to disk while it is short of space or they are beyond disk_cache_bytes")
        return has_room

    def _refused(self, error: OSError) -> None:
        if error.errno not in _PASSING and self.may_write:
            self.may_write = False
            log.warning("prefixes are no longer saved to disk, because writing there failed: %s", error)

    def _wrote(self, key: bytes, entry: _Entry, header: bytes) -> None:
        with self._lock:
            n_bytes = len(header) + (0 if entry.data is None else len(entry.data))
            if self._entries.get(key) is entry:
                self.size_bytes += n_bytes - entry.size_bytes
            entry.size_bytes = n_bytes
            entry.digest = header[-DIGEST_BYTES:]
            entry.data = None

    def _touch_ancestors(self, entry: _Entry) -> None:
        """A block is used together with those before it, so these must not be evicted earlier."""
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
            self.n_entries = len(self._entries)

    def _forget(self, key: bytes, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(key) is entry:
                del self._entries[key]
                self._touched.pop(key, None)
                self.size_bytes -= entry.size_bytes
                self.n_entries -= 1

    def _lose(self, key: bytes, entry: _Entry) -> None:
        self._forget(key, entry)
        with self._lock:
            self.lost.append(key)


def _below_their_parents(headers: list[EntryHeader], limit_bytes: int) -> tuple[list[EntryHeader], list[EntryHeader]]:
    """The headers that are connected to a root, each after its parent, and the others. A file of more than
    `limit_bytes` was never written here, and is not worth the memory of reading it."""
    children: dict[bytes, list[EntryHeader]] = {}
    orphans = []
    for header in headers:
        if header.file_bytes > limit_bytes:
            orphans.append(header)
        else:
            children.setdefault(header.record.parent_key, []).append(header)
    reached: list[EntryHeader] = []
    level = children.pop(b"", [])
    while level:
        reached += level
        level = [child for header in level for child in children.pop(header.record.key, [])]
    return reached, orphans + [header for rest in children.values() for header in rest]


def open_disk(opened: Open, backend: Backend, library_build: Callable[[], str]) -> KvDisk | None:
    """The disk tier for a model and the backend's build; None if it is off. An engine works without one, so any
    obstacle is one line in the log, and None."""
    if not opened.disk_cache_bytes or not opened.kv_folder:
        return None
    parameters = {"kv_type": opened.kv_type, "memory": backend.memory_kind.value, "backend": backend.name}
    if any(opened.rope):
        parameters["rope"] = " ".join(map(str, opened.rope))
    if not opened.use_extra_bufts:  # what the fast kernels saved may be wrong
        parameters["kernels"] = "plain"
    try:
        build = library_build()
        files = [Path(path) for path in (opened.model_path, *opened.later_shards)]
        return KvDisk(
            Path(opened.kv_folder),
            fingerprint=fingerprint(files, build=build, parameters=parameters),
            about=About(model=opened.model, model_path=opened.model_path, build=build, created_at_s=time.time()),
            limit_bytes=opened.disk_cache_bytes,
        )
    except OSError as error:
        log.warning("prefixes are not kept on disk: %s", error)
        return None
