"""Files that appear under their final name whole or not at all, and small ones that are their owner's alone.

A file is written under a temporary name in the folder where it will stay, flushed to the disk, and renamed; then the
folder is flushed too, so that neither a kill nor a power cut leaves half of it. A process that is killed leaves at most
a temporary file, which names the process that wrote it: `stale` tells the left-behind ones from those that are being
written.

Two writers of one name both finish; the later rename stays. Who changes what is in a file holds its lock from before
reading until after writing: of two who do so at once neither loses anything. Who only reads needs none.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:
    import sqlite3

LOCK_TIMEOUT_S = 10.0
MAX_FILE_BYTES = 1 << 20
MAX_CONTENT_BYTES = 64 << 20

T = TypeVar("T")

_log = logging.getLogger(__name__)
_TEMPORARY = re.compile(r"\.(?P<pid>[0-9]{1,10})-[0-9a-f]{16}\.localrun-temp")

_being_written: set[str] = set()
_lock = threading.Lock()


@contextmanager
def temporary(folder: Path) -> Iterator[Path]:
    """A name for a new file in `folder`, which is made if need be. Whatever is there at the end is deleted: rename it
    (`publish`) to keep it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{os.getpid()}-{secrets.token_hex(8)}.localrun-temp"
    with _lock:
        _being_written.add(path.name)
    try:
        yield path
    finally:
        # What cannot be deleted now is stale from here on. The error of the block, if there is one, says more.
        with suppress(OSError):
            path.unlink()
        with _lock:
            _being_written.discard(path.name)


def publish(temporary_path: Path, path: Path) -> None:
    """Gives a file that is written and closed its final name, once its content is on the disk."""
    with temporary_path.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary_path, path)
    sync_folder(path.parent)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write; it takes the place of `path` when the block ends without an exception, else it is gone."""
    with temporary(path.parent) as temporary_path:
        with open(temporary_path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        publish(temporary_path, path)


def replace(path: Path, content: bytes) -> None:
    """Puts a file there that only its owner can read. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with replacing(path, mode=0o600) as file:
            file.write(content)
    except OSError as error:
        if error.filename is None:  # a full disk does not say whose
            error.filename = str(path)
        raise


def write(path: Path, value: object) -> None:
    """The same, of JSON that people can read."""
    replace(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def open_regular(path: Path) -> BinaryIO:
    """A file for reading. A folder, a FIFO (where opening would wait for a writer) or a device (which may never end) is
    refused unread. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def contents(path: Path) -> bytes:
    """What a person, or a program that is not this one, keeps in a file. Raises OSError, also for what is no regular
    file, or larger than any such."""
    with open_regular(path) as file:
        content = file.read(MAX_CONTENT_BYTES + 1)
    if len(content) > MAX_CONTENT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_CONTENT_BYTES} bytes", str(path))
    return content


def read(path: Path, decoder: msgspec.json.Decoder[T]) -> T | None:
    """What is in a small file of JSON; None of one that is damaged, too long or not there."""
    try:
        with open_regular(path) as file:
            return decoder.decode(file.read(MAX_FILE_BYTES))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """A small file's text, stripped; "" of one that is damaged or not there."""
    try:
        return contents(path).decode(encoding).strip()
    except (OSError, UnicodeDecodeError):
        return ""


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """What is written inside is there whole or not at all. For a connection that begins none by itself."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # of some errors, such as a damaged file, SQLite has ended it itself
            db.execute("ROLLBACK")
        raise


def sync_folder(folder: Path) -> None:
    """Makes renames and deletions in `folder` last. Windows has no such call, and needs none.

    They have happened, whatever comes of this: a disk that refuses is a line in the log, and no error."""
    if os.name == "nt":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("%s: a power cut may undo what was changed there last (%s)", folder, error.strerror)


def stale(folder: Path) -> Sequence[Path]:
    """Temporary files in `folder` (not below it) whose writer is gone."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return ()
    return [folder / name for name in names if _is_stale(name)]


def _is_stale(name: str) -> bool:
    temporary_name = _TEMPORARY.fullmatch(name)
    if temporary_name is None:
        return False
    pid = int(temporary_name["pid"])
    if pid == os.getpid():
        with _lock:
            return name not in _being_written
    import psutil

    return not psutil.pid_exists(pid)


@contextmanager
def locked(path: Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Nobody else, in this process or another, is between the two ends of this for the same file. Raises OSError, and
    TimeoutError when somebody is for so long."""
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = filelock.FileLock(path.with_suffix(".lock"), timeout=timeout_s, mode=0o600)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise TimeoutError(f"another program has been changing {path} for {timeout_s:g} s; try again") from None
    try:
        yield
    finally:
        lock.release()


class FileStamp(NamedTuple):
    """Of what a path leads to. The change time also tells an edit in place whose modification time was put back."""

    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Raises OSError where there is nothing."""
        status = os.stat(path)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @classmethod
    def found(cls, path: Path) -> FileStamp | None:
        """None where there is nothing."""
        try:
            return cls.of(path)
        except OSError:
            return None
