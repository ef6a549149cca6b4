"""The unfinished file, its journal and its lock, beside the place where the finished file will be; and what abandoned
downloads left of them.

`<target>.localrun-partial` has the final size from the start, with holes or old blocks where bytes are missing;
`<target>.localrun-journal` says which are there. Used by one fetch, which holds the lock of the target: whatever
touches the disk is called in its threads, perhaps in several at once; `missing` and `add` belong to its event loop.

The lock is that of huggingface_hub (package filelock), so that its clients and ours wait for each other in the shared
cache. A killed process holds no lock; no order is kept among those who wait.

Invariant: what `missing` does not list was written as the server sent it, and is still so after a kill or a power cut.

Does not: verify the digest of the whole (`fetch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import threading
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import filelock
import msgspec

from localrun import stored
from localrun.errors import DiskFull, DownloadFailed
from localrun.models.download import journal
from localrun.models.download.journal import Header, Journal, Range, RangeSet, Record
from localrun.models.download.plan import Item

_POLL_S = 0.2
# Group-writable, as huggingface_hub makes its own: several users may share a cache.
_MODE = 0o664


@contextlib.asynccontextmanager
async def held(path: Path, *, is_kept: bool) -> AsyncIterator[None]:
    """Waits for the lock, holds it inside the block. Unless `is_kept`, its file is deleted at the end.

    Deleting is safe only while the lock is held: one who waited for the deleted file notices and begins anew.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not per thread: the event loop's thread is the only one, and tests run several loops.
    lock = filelock.FileLock(path, mode=_MODE, thread_local=False)
    while True:
        try:
            lock.acquire(blocking=False)
            break
        except filelock.Timeout:
            await asyncio.sleep(_POLL_S)
    try:
        yield
    finally:
        _release(lock, path, is_kept=is_kept)


@contextlib.contextmanager
def held_at_once(path: Path, *, is_kept: bool) -> Iterator[bool]:
    """Holds the lock inside the block if it is free now; yields whether it was; False on read-only folders."""
    lock = filelock.FileLock(path, mode=_MODE, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except (filelock.Timeout, OSError):
        yield False
        return
    try:
        yield True
    finally:
        _release(lock, path, is_kept=is_kept)


def _release(lock: filelock.BaseFileLock, path: Path, *, is_kept: bool) -> None:
    if not is_kept:
        # Windows deletes no open file; filelock does it there when it releases.
        with contextlib.suppress(OSError):
            path.unlink()
    lock.release()


PARTIAL_SUFFIX = ".localrun-partial"
JOURNAL_SUFFIX = ".localrun-journal"
LOCK_SUFFIX = ".localrun-lock"

_READ_BYTES = 1024 * 1024
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system


class Paths(NamedTuple):
    partial: Path
    journal: Path
    lock: Path


def paths_of(target: Path) -> Paths:
    """Where the unfinished file, its journal and its lock lie."""
    return Paths(*(target.with_name(target.name + suffix) for suffix in (PARTIAL_SUFFIX, JOURNAL_SUFFIX, LOCK_SUFFIX)))


def allocated_bytes(path: Path) -> int:
    """What a file takes on the disk now; 0 if there is none. Where the system does not say, its size."""
    try:
        status = path.stat()
    except OSError:
        return 0
    n_blocks: int | None = getattr(status, "st_blocks", None)
    return status.st_size if n_blocks is None else n_blocks * _BLOCK_BYTES


class Partial:
    """Open from `open` to `close`.

    `is_doubtful`: what is there may be of two contents, because a former attempt left it or the server's ETag changed.
    """

    def __init__(self, target: Path, file: BinaryIO, header: Header, *, sync_bytes: int) -> None:
        self.header = header
        self.is_doubtful = False
        self._target = target
        self._paths = paths_of(target)
        self._file = file
        self._journal: Journal | None = None
        self._ranges = RangeSet()
        # Held while the disk is written, which may take seconds; so the event loop never asks for it.
        self._disk_lock = threading.Lock()
        self._sync_bytes = sync_bytes
        self._n_unsynced_bytes = 0

    @classmethod
    def open(cls, target: Path, header: Header, *, sync_bytes: int) -> Partial:
        """Goes on with what a former attempt left, if it was for the same content; else begins anew.

        `header.validator` is ignored here: the journal's is taken over. Content of which neither a digest nor a
        validator is known is never gone on with. Raises OSError, and DownloadFailed for a newer localrun's journal.
        """
        paths = paths_of(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not "w+b", which would empty what a former attempt left.
        paths.partial.touch()
        partial = cls(target, paths.partial.open("r+b", buffering=0), header, sync_bytes=sync_bytes)
        try:
            partial._begin()
        except BaseException:
            partial.close()
            if not paths.journal.exists():
                partial.discard()
            raise
        return partial

    @property
    def n_bytes(self) -> int:
        """How many bytes are there."""
        return self._ranges.n_bytes

    def missing(self, within: Range | None = None) -> list[Range]:
        """What is to be transferred yet, of the whole file or a part of it."""
        return self._ranges.missing(within or Range(0, self.header.size_bytes))

    def write(self, start: int, content: bytes) -> Range:
        """Writes and records it, and returns what to `add`. Raises OSError, nothing recorded."""
        crc32 = zlib.crc32(content)
        added = Range(start, start + len(content))
        with self._disk_lock:
            self._file.seek(start)
            left = memoryview(content)
            while left:
                left = left[self._file.write(left) :]
            self._opened_journal().append(Record(added, crc32))
            self._n_unsynced_bytes += len(content)
            if self._n_unsynced_bytes >= self._sync_bytes:
                self._sync()
        return added

    def add(self, written: Range) -> None:
        """Takes it off what is missing."""
        self._ranges.add(written)

    def restart(self, validator: str) -> None:
        """Forgets every range: the content on the server is now what `validator` names ("" if it names nothing).

        Only while nobody writes.
        """
        with self._disk_lock:
            self._ranges = RangeSet()
            self.header = msgspec.structs.replace(self.header, validator=validator)
            self._new_journal()

    def learn_validator(self, validator: str) -> None:
        """Takes over the name that the server gives the content, if none is known. Ranges that are there stay."""
        with self._disk_lock:
            if not self.header.validator and validator and not self.n_bytes:
                self.header = msgspec.structs.replace(self.header, validator=validator)
                self._new_journal()

    def sync(self) -> None:
        """Makes every recorded range certain. Raises OSError."""
        with self._disk_lock:
            self._sync()

    def publish(self) -> None:
        """Gives the file its final name and drops the journal. Only for a complete, verified, synced file. Raises
        OSError."""
        self.close()
        os.replace(self._paths.partial, self._target)
        stored.sync_folder(self._target.parent)
        self._paths.journal.unlink(missing_ok=True)

    def discard(self) -> None:
        """Deletes what was transferred."""
        self.close()
        self._paths.partial.unlink(missing_ok=True)
        self._paths.journal.unlink(missing_ok=True)

    def close(self) -> None:
        with self._disk_lock:
            self._file.close()
            if self._journal is not None:
                self._journal.close()

    def _begin(self) -> None:
        found = journal.read(self._paths.journal)
        _allocate(self._file, self.header.size_bytes)
        if found is not None and _is_same_content(found.header, self.header):
            self.header = found.header
            self._ranges = RangeSet(self._sound(found))
            self.is_doubtful = self._ranges.n_bytes > 0
        if found is not None and self.is_doubtful:
            self._journal = Journal.reopen(self._paths.journal, found.n_sound_bytes)
        else:
            self.header = msgspec.structs.replace(self.header, validator="")
            self._new_journal()

    def _sound(self, found: journal.JournalContents) -> list[Range]:
        """The recorded ranges whose content is certain, or is what it was when it was recorded.

        A record that the power cut belied is not taken back: its range is transferred and recorded again.
        """
        certain = [record.range for record in found.records[: found.n_synced]]
        checked = [
            record.range for record in found.records[found.n_synced :] if self._crc32(record.range) == record.crc32
        ]
        return certain + checked

    def _crc32(self, within: Range) -> int:
        self._file.seek(within.start)
        crc32, left = 0, within.size_bytes
        while left > 0 and (content := self._file.read(min(left, _READ_BYTES))):
            crc32 = zlib.crc32(content, crc32)
            left -= len(content)
        return crc32

    def _new_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._journal = Journal.create(self._paths.journal, self.header)
        self._n_unsynced_bytes = 0

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._opened_journal().content_reached_the_disk()
        self._n_unsynced_bytes = 0

    def _opened_journal(self) -> Journal:
        assert self._journal is not None
        return self._journal


def failed(target: Path, error: OSError) -> DownloadFailed:
    """The error of ours for one of the file system's."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"the disk of {target.parent} is full; what was transferred is kept: make room (localrun rm, localrun gc) "
            f"and pull again"
        )
    if error.errno == errno.EFBIG:
        return DownloadFailed(f"the file system of {target.parent} cannot hold a file as large as {target.name}")
    return DownloadFailed(f"{target.name} cannot be written in {target.parent}: {error.strerror or error}")


def check_disk(items: Iterable[Item], *, reserve_bytes: int) -> None:
    """Raises DiskFull when the items, all together, need more than their file systems have, DownloadFailed when it
    cannot be told.

    What former attempts already took is not counted again, nor are finished targets and items of unknown size.
    """
    needed_bytes: dict[int, int] = {}
    folders: dict[int, Path] = {}
    names: dict[int, str] = {}
    for item in items:
        try:
            if item.size_bytes is None or item.target.exists():
                continue
            folder = _existing(item.target.parent)
            device = os.stat(folder).st_dev
        except OSError as error:
            raise failed(item.target, error) from error
        folders[device] = folder
        missing_bytes = max(0, item.size_bytes - allocated_bytes(paths_of(item.target).partial))
        needed_bytes[device] = needed_bytes.get(device, 0) + missing_bytes
        names.setdefault(device, item.name)
    for device, n_bytes in needed_bytes.items():
        free_bytes = shutil.disk_usage(folders[device]).free
        if n_bytes and n_bytes + reserve_bytes > free_bytes:
            raise DiskFull(
                f"not enough disk space for {names[device]} in {folders[device]}: {n_bytes / 1e9:.2f} GB are still to "
                f"be written and {reserve_bytes / 1e9:.2f} GB are kept free, but only {free_bytes / 1e9:.2f} GB are "
                f"there; remove models (localrun rm), clear abandoned downloads (localrun gc), or choose a smaller "
                f"quantization"
            )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _is_same_content(found: Header, wanted: Header) -> bool:
    same = (found.size_bytes, found.sha256, found.git_sha1) == (wanted.size_bytes, wanted.sha256, wanted.git_sha1)
    return same and bool(found.sha256 or found.git_sha1 or found.validator)


def _allocate(file: BinaryIO, size_bytes: int) -> None:
    """The final size, with room reserved where the file system can: a full disk shows at once. Raises OSError."""
    if hasattr(os, "posix_fallocate") and size_bytes > 0:
        try:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV):
                raise
    os.ftruncate(file.fileno(), size_bytes)


# --- what abandoned downloads left ---
# A partial file is worth keeping as long as somebody may pull again, so `find_stale` takes an age; what nobody can go
# on with (a journal without its partial file, a lock that nobody holds, a temporary file whose writer is gone) counts
# as stale at any age. Downloads that run now are never listed: their lock is held. Nor is what other programs left,
# such as huggingface_hub's own `.incomplete` files.

_SUFFIXES = (PARTIAL_SUFFIX, JOURNAL_SUFFIX, LOCK_SUFFIX)
# Where the shared Hugging Face cache has the locks of its files, relative to the cache.
_HUB_LOCKS = ".locks"


class StaleDownload(NamedTuple):
    """What is left of one download. `target` is what would have become of it, `size_bytes` what it takes on disk."""

    target: Path
    paths: tuple[Path, ...]
    size_bytes: int
    age_s: float

    def is_stale(self, min_age_s: float) -> bool:
        """Whether the last byte came so long ago, or there is nothing to go on with."""
        return self.age_s >= min_age_s or paths_of(self.target).partial not in self.paths


def find_stale(folders: Iterable[Path], *, now_s: float, min_age_s: float) -> Sequence[StaleDownload]:
    """Abandoned downloads below the folders, by path. `now_s` is seconds since the epoch.

    `min_age_s` is the time since the last byte came; 0 lists every download that does not run now.
    """
    found: dict[Path, StaleDownload | None] = {}
    for folder in folders:
        for root, _, names in os.walk(folder):
            for path in stored.stale(Path(root)):
                found[path] = StaleDownload(path, (path,), allocated_bytes(path), 0.0)
            for name in names:
                suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
                if suffix is not None:
                    target = Path(root, name.removesuffix(suffix))
                    found[target] = _left_of(target, now_s)
    return [each for _, each in sorted(found.items()) if each is not None and each.is_stale(min_age_s)]


def remove_stale(stale: StaleDownload) -> int:
    """Deletes it, and returns the bytes that this freed; 0 if the download runs again by now."""
    with _locked(stale.target) as is_abandoned:
        if not is_abandoned:
            return 0
        freed_bytes = 0
        for path in stale.paths:
            n_bytes = allocated_bytes(path)
            try:
                path.unlink()
            except FileNotFoundError:
                continue
            freed_bytes += n_bytes
        return freed_bytes


def _left_of(target: Path, now_s: float) -> StaleDownload | None:
    present = tuple(path for path in paths_of(target) if path.exists())
    with _locked(target) as is_abandoned:
        if not is_abandoned:
            return None
        stats = [path.stat() for path in present if path.exists()]
    age_s = max(0.0, now_s - max((status.st_mtime for status in stats), default=now_s))
    return StaleDownload(target, present, sum(map(allocated_bytes, present)), age_s)


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[bool]:
    """Keeps downloads of the target out, if none runs: holds its own lock and the Hugging Face cache's for it."""
    with contextlib.ExitStack() as locks:
        hub_lock = target.parent.parent.parent / _HUB_LOCKS / target.parent.parent.name / f"{target.name}.lock"
        is_free = locks.enter_context(held_at_once(paths_of(target).lock, is_kept=False))
        if is_free and target.parent.name == "blobs" and hub_lock.exists():
            is_free = locks.enter_context(held_at_once(hub_lock, is_kept=True))
        yield is_free
