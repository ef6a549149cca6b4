"""The lock that keeps two processes, or two fetches of one, from writing the same file.

It is the lock of huggingface_hub (package filelock), so that its clients and ours wait for each other in the shared
cache. A killed process holds no lock.

Does not: keep order among those who wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import filelock

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
    """Holds the lock inside the block if it is free now; says whether it is. It is not where nothing may be written."""
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
