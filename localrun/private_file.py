"""Files that are their owner's alone: settings, keys and what was allowed, small, and replaced as a whole.

A file has its old content or its new one, whatever is killed and when, also after a loss of power. Who changes what is
in one holds its lock from before reading until after writing: of two who do so at once neither loses anything. Who only
reads needs none.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK_TIMEOUT_S = 10.0


def replace(path: Path, content: bytes) -> None:
    """Puts a file there that only its owner can read, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError) and error.filename is None:  # a full disk does not say whose
            error.filename = str(path)
        raise


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
