"""What abandoned downloads left on the disk. Pure but for the folders that it looks through.

A partial file is worth keeping as long as somebody may pull again, so `find` takes an age; what nobody can go on with
(a journal without its partial file, a lock that nobody holds, a temporary file whose writer is gone) counts as stale at
any age. Downloads that run now are never listed: their lock is held.

Does not: touch what other programs left, such as huggingface_hub's own `.incomplete` files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from localrun import stored
from localrun.models.download.partial import (
    JOURNAL_SUFFIX,
    LOCK_SUFFIX,
    PARTIAL_SUFFIX,
    allocated_bytes,
    held_at_once,
    paths_of,
)

_SUFFIXES = (PARTIAL_SUFFIX, JOURNAL_SUFFIX, LOCK_SUFFIX)
# Where the shared Hugging Face cache has the locks of its files, relative to the cache.
_HUB_LOCKS = ".locks"


class StaleDownload(NamedTuple):
    """What is left of one download. `target` is what would have become of it, `size_bytes` what it takes on disk."""

    target: Path
    paths: tuple[Path, ...]
    size_bytes: int
    age_s: float


def find(folders: Iterable[Path], *, now_s: float, min_age_s: float) -> Sequence[StaleDownload]:
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
    return [
        each
        for _, each in sorted(found.items())
        if each is not None and (each.age_s >= min_age_s or paths_of(each.target).partial not in each.paths)
    ]


def remove(stale: StaleDownload) -> int:
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
