"""Decoded pictures and sound as files: who needs them, and how long they stay.

    <cache folder>/media/            0700
      <pid>-<8 hex digits>.lock      held by a daemon as long as it runs
      <pid>-<8 hex digits>/          0700, that daemon's
        in, out                      between the daemon and its worker
        <64 hex digits>              pixels or samples, named by what they were decoded from

A file that a request uses stays until the request ends. Then it is kept for the next turn of the conversation, which
sends the same picture again, as long as all kept files have at most `KEEP_BYTES`. The folder goes with the daemon; what
a daemon left behind that was killed is removed by the next one's start.

Owner: the daemon's event loop; `open`, `adopt`, `empty` and `close` work on the disk and may be called from a thread,
one at a time. Does not: decode.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import filelock

from localrun.errors import Unavailable
from localrun.wire import Media, MediaKind

KEEP_BYTES = 256 * 1024 * 1024
MAX_BYTES = 4 * 1024 * 1024 * 1024


class Key(NamedTuple):
    """What a file was decoded from (the SHA-256 of its bytes) and how."""

    digest: bytes
    kind: MediaKind
    audio_rate_hz: int = 0
    max_side: int = 0

    @property
    def file_name(self) -> str:
        return f"{self.digest.hex()}-{self.audio_rate_hz or self.max_side}"


class _Kept:
    def __init__(self, media: Media, size_bytes: int) -> None:
        self.media = media
        self.size_bytes = size_bytes
        self.n_users = 0


class DecodedFiles:
    """See the module. `root` is the folder of all daemons."""

    def __init__(self, root: Path, *, keep_bytes: int = KEEP_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self._root = root
        self.folder = root / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = filelock.FileLock(root / f"{self.folder.name}.lock", thread_local=False)
        self._keep_bytes = keep_bytes
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self.size_bytes = 0

    @property
    def input_path(self) -> Path:
        return self.folder / "in"

    @property
    def output_path(self) -> Path:
        return self.folder / "out"

    def open(self) -> bool:
        """Makes the folder, again if somebody has emptied the cache folder. Whether it did: a worker that runs has
        files open then that are no longer these. Raises OSError."""
        if self.input_path.is_file() and self.output_path.is_file():
            return False
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root.chmod(0o700)
        self._lock.release(force=True)  # its file may be gone as well
        self._lock.acquire(timeout=0)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.input_path.touch(0o600)
        self.output_path.touch(0o600)
        return True

    def close(self) -> None:
        """Removes everything."""
        self._kept.clear()
        self.size_bytes = 0
        _remove(self.folder, self._lock)

    def take(self, key: Key) -> Media | None:
        """The file, which stays until it is given back; None if it is not here, or somebody has removed it."""
        kept = self._kept.get(key)
        if kept is None or not Path(kept.media.path).is_file():
            return None
        kept.n_users += 1
        self._kept.move_to_end(key)
        return kept.media

    def give_back(self, key: Key) -> None:
        """One who took it needs it no more."""
        kept = self._kept.get(key)
        if kept is not None:  # the daemon has not ended
            kept.n_users -= 1
            self._shrink(self._keep_bytes)

    def make_room(self, size_bytes: int) -> None:
        """Raises Unavailable when those in use and one of this size are too much."""
        in_use_bytes = sum(kept.size_bytes for kept in self._kept.values() if kept.n_users)
        self._shrink(self._max_bytes - in_use_bytes - size_bytes)
        if self.size_bytes + size_bytes > self._max_bytes:
            raise Unavailable(
                f"the pictures and recordings of the requests under way take {self.size_bytes / 1e9:.1f} GB on disk, "
                f"and this one would go beyond the limit of {self._max_bytes / 1e9:.1f} GB; try again when they have "
                f"ended"
            )

    def drop_unused(self) -> bool:
        """Removes what is only kept for later turns. Whether there was any."""
        before_bytes = self.size_bytes
        self._shrink(0)
        return self.size_bytes < before_bytes

    def adopt(self, key: Key) -> Path:
        """The worker's output as a file of its own. Raises OSError."""
        path = self.folder / key.file_name
        try:
            shutil.copyfile(self.output_path, path)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path

    def empty(self) -> None:
        """The worker is done with its files, one way or the other: they take no room any more."""
        for scratch in (self.input_path, self.output_path):
            with contextlib.suppress(OSError):
                os.truncate(scratch, 0)

    def add(self, key: Key, media: Media, size_bytes: int) -> None:
        """Keeps a file that was adopted."""
        if key not in self._kept:  # else it takes the place of one that somebody has removed
            self._kept[key] = _Kept(media, size_bytes)
            self.size_bytes += size_bytes

    def _shrink(self, limit_bytes: int) -> None:
        """Removes what nobody uses, the oldest first, until what is left of that is within the limit."""
        unused = [key for key, kept in self._kept.items() if not kept.n_users]
        left_bytes = sum(self._kept[key].size_bytes for key in unused)
        for key in unused:
            if left_bytes <= limit_bytes:
                return
            kept = self._kept.pop(key)
            left_bytes -= kept.size_bytes
            self.size_bytes -= kept.size_bytes
            with contextlib.suppress(OSError):
                Path(kept.media.path).unlink()


def sweep(root: Path) -> None:
    """Removes what daemons left behind that are gone."""
    for path in root.glob("*.lock") if root.is_dir() else ():
        lock = filelock.FileLock(path, thread_local=False)
        with contextlib.suppress(OSError, filelock.Timeout):
            lock.acquire(timeout=0)
            _remove(path.with_suffix(""), lock)


def _remove(folder: Path, lock: filelock.FileLock) -> None:
    if not lock.is_locked:
        return
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    with contextlib.suppress(OSError):
        Path(lock.lock_file).unlink()
