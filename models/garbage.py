"""Finds and deletes what nobody needs any more below the models folder and in the hub's cache.

Used by the daemon's threads. Garbage is: temporary files whose writer is gone, files of downloads that were given up,
and blobs that no manifest names. Blobs are spared while they are young, for `create` uploads them before it names them,
and all of them while a manifest is unreadable, for it may name them.

Does not: touch models, or files that localrun did not write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from localrun.models import atomic_file, manifest
from localrun.models.download import stale
from localrun.models.store import Store

# An upload and the `create` that names it are minutes apart at most.
MIN_AGE_S = 3600.0
# A pull that was broken off may be gone on with days later.
PARTIAL_MIN_AGE_S = 14 * 24 * 3600.0


class Collected(NamedTuple):
    """What was deleted, and `kept_blobs`: unnamed blobs that were spared."""

    freed_bytes: int
    files: list[Path]
    kept_blobs: int


def collect(
    store: Store, *, now_s: float, min_age_s: float = MIN_AGE_S, partial_min_age_s: float = PARTIAL_MIN_AGE_S
) -> Collected:
    """Deletes the garbage. `now_s` is Unix time; unnamed blobs younger than `min_age_s` stay, and downloads of which
    the last byte came less than `partial_min_age_s` ago."""
    with store.changing:
        freed_bytes, files = 0, []
        folders = (store.blobs.folder, store.hub_cache_folder)
        for left in stale.find(folders, now_s=now_s, min_age_s=partial_min_age_s):
            with contextlib.suppress(OSError):
                freed_bytes += stale.remove(left)
                files += [path for path in left.paths if not path.exists()]
        for path in _temporary_files(store):
            with contextlib.suppress(OSError):
                size_bytes = path.lstat().st_size
                path.unlink()
                freed_bytes += size_bytes
                files.append(path)
        survey = manifest.read_all(store.folder)
        named = {file.digest for said in survey.manifests.values() for file in said.files}
        kept_blobs = 0
        for blob in store.blobs.all():
            if blob.digest in named:
                continue
            if survey.damaged or now_s - blob.modified_at_s < min_age_s:
                kept_blobs += 1
                continue
            with contextlib.suppress(OSError):
                n_bytes = store.blobs.remove(blob.digest)
                if not blob.path.exists():
                    freed_bytes += n_bytes
                    files.append(blob.path)
        _remove_empty_folders(store.folder / manifest.FOLDER)
        return Collected(freed_bytes, files, kept_blobs)


def _temporary_files(store: Store) -> Iterator[Path]:
    yield from atomic_file.stale(store.folder)
    for folder in sorted((store.folder / manifest.FOLDER).glob("*/*/*/")):
        yield from atomic_file.stale(folder)


def _remove_empty_folders(root: Path) -> None:
    for depth in ("*/*/*/", "*/*/", "*/"):
        for folder in root.glob(depth):
            with contextlib.suppress(OSError):
                folder.rmdir()
