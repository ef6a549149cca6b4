"""Whether the disk has room, asked before the first byte is transferred.

Does not: reserve anything (`partial` does, where the file system can), or delete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from localrun.errors import DiskFull
from localrun.models.download.item import Item
from localrun.models.download.partial import allocated_bytes, failed, paths_of


def check(items: Iterable[Item], *, reserve_bytes: int) -> None:
    """Raises DiskFull when the items, all together, need more than their file systems have, DownloadFailed when it
    cannot be told.

    What former attempts already took is not counted again, nor are finished targets and items of unknown size.
    """
    needed_bytes: dict[int, int] = {}
    folders: dict[int, Path] = {}
    names: dict[int, list[str]] = {}
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
        names.setdefault(device, []).append(item.name)
    for device, n_bytes in needed_bytes.items():
        free_bytes = shutil.disk_usage(folders[device]).free
        if n_bytes and n_bytes + reserve_bytes > free_bytes:
            raise no_room(folders[device], names[device][0], n_bytes, free_bytes, reserve_bytes)


def no_room(folder: Path, name: str, needed_bytes: int, free_bytes: int, reserve_bytes: int) -> DiskFull:
    """The error that says how much is missing and where."""
    return DiskFull(
        f"not enough disk space for {name} in {folder}: {needed_bytes / 1e9:.2f} GB are still to be written and "
        f"{reserve_bytes / 1e9:.2f} GB are kept free, but only {free_bytes / 1e9:.2f} GB are there; remove models "
        f"(localrun rm), clear abandoned downloads (localrun gc), or choose a smaller quantization"
    )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder
