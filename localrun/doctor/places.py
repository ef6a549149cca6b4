"""The folders: whether they can be made, read and written, and by nobody else."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from localrun.doctor.finding import Finding, fail, ok, warn
from localrun.doctor.machine import existing

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_places(places: Mapping[str, Path]) -> Iterator[Finding]:
    """By name, such as `data`. One line for all that are well, one for each that is not."""
    sound = []
    for name, folder in places.items():
        finding = _problem(name, folder)
        if finding is None:
            sound.append(name)
        else:
            yield finding
    if sound:
        yield ok("folders", f"{', '.join(sound)} can be written")


def _problem(name: str, folder: Path) -> Finding | None:
    check = "folders"
    if not folder.exists():
        above = existing(folder)
        if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
            return None
        return fail(check, f"{name}: {folder} cannot be made in {above}", f"make {above} yours, or set LOCALRUN_HOME")
    if not folder.is_dir():
        return fail(check, f"{name}: {folder} is no folder", "move it away, or set LOCALRUN_HOME")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return fail(check, f"{name}: {folder} cannot be read and written by you", f"sudo chown -R $(id -u) {folder}")
    if sys.platform != "win32":
        status = folder.stat()
        if status.st_uid != os.getuid():
            return warn(check, f"{name}: {folder} belongs to another user", f"sudo chown -R $(id -u) {folder}")
        if status.st_mode & _OTHERS_MAY_WRITE and not status.st_mode & stat.S_ISVTX:
            return warn(check, f"{name}: others may write to {folder}", f"chmod go-w {folder}")
    return None
