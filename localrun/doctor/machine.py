"""Memory and disk space, the folders, and how many threads engines use."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from localrun.doctor.finding import Finding, fail, ok, size, warn
from localrun.processors import Processors
from localrun.thread_choice import Kept

# The built-in model runs in a tenth of this; a small useful one (1B, 4 bits) needs about all of it.
LOW_MEMORY_BYTES = 2_000_000_000
LEAST_MEMORY_BYTES = 300_000_000
LOW_DISK_BYTES = 10_000_000_000
LEAST_DISK_BYTES = 500_000_000
FULL_DISK_BYTES = 20_000_000


def check_memory(available_bytes: int, total_bytes: int) -> Finding:
    """Of the machine, or of the container around us."""
    text = f"{size(available_bytes)} of {size(total_bytes)} available"
    if available_bytes < LEAST_MEMORY_BYTES:
        return fail("memory", text, "close other programs, or give this container more memory: no model can be loaded")
    if available_bytes < LOW_MEMORY_BYTES:
        return warn("memory", text, "close other programs before loading models larger than the built-in one")
    return ok("memory", text)


def memory(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Available and total bytes, by the system and by a container's limit (cgroup v2)."""
    of_machine = psutil.virtual_memory()
    available, total = int(of_machine.available), int(of_machine.total)
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no such file on this system, or the word "max": no limit
        return available, total
    return min(available, max(0, limit - used)), min(total, limit)


def check_disk(folder: Path, free_bytes: int) -> Finding:
    """`folder` is where models are pulled to."""
    text = f"{size(free_bytes)} free at {folder}"
    if free_bytes < LEAST_DISK_BYTES:
        return fail("disk", text, "free some space, or put models on another disk with LOCALRUN_MODELS")
    if free_bytes < LOW_DISK_BYTES:
        return warn("disk", text, "an 8B model takes 5 GB; free some space, or set LOCALRUN_MODELS")
    return ok("disk", text)


def check_cache_disk(folder: Path, free_bytes: int, *, kv_limit_bytes: int, kv_used_bytes: int) -> Iterator[Finding]:
    """`folder` is the cache folder, perhaps on another disk than models: small files go there, and the KV cache, which
    may still grow to its limit. Nothing is said while there is room."""
    to_come_bytes = kv_limit_bytes - kv_used_bytes
    if free_bytes < FULL_DISK_BYTES:
        yield fail(
            "disk", f"{size(free_bytes)} free at {folder}", "free some space, or move all folders with LOCALRUN_HOME"
        )
    elif to_come_bytes > free_bytes:
        yield warn(
            "disk", f"the KV cache may take {size(to_come_bytes)} more, more than is free at {folder}",
            "lower disk_cache_bytes (LOCALRUN_DISK_CACHE), or `localrun cache clear --disk`",
        )  # fmt: skip


def free_bytes(folder: Path) -> int:
    """Of the disk that the folder is on, or will be on."""
    return int(psutil.disk_usage(str(existing(folder))).free)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))


# --- the folders: whether they can be made, read and written, and by nobody else ---

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
        yield ok("folders", f"{', '.join(sound)} are writable")


def _problem(name: str, folder: Path) -> Finding | None:
    check = "folders"
    if not folder.exists():
        above = existing(folder)
        if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
            return None
        return fail(
            check, f"{name}: {folder} cannot be created in {above}", f"make {above} yours, or set LOCALRUN_HOME"
        )
    if not folder.is_dir():
        return fail(check, f"{name}: {folder} is not a folder", "move it away, or set LOCALRUN_HOME")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return fail(check, f"{name}: {folder} is not readable and writable for you", f"sudo chown -R $(id -u) {folder}")
    if sys.platform != "win32":
        status = folder.stat()
        if status.st_uid != os.getuid():
            return warn(check, f"{name}: {folder} belongs to another user", f"sudo chown -R $(id -u) {folder}")
        if status.st_mode & _OTHERS_MAY_WRITE and not status.st_mode & stat.S_ISVTX:
            return warn(check, f"{name}: others may write to {folder}", f"chmod go-w {folder}")
    return None


# --- threads: what limits them, and what was measured ---

MAX_MODELS = 3


def check_threads(processors: Processors, kept: Iterable[Kept], *, wanted: int) -> Finding:
    """`wanted` is the setting `threads`, and `kept` all that was measured, here and under other limits."""
    most, usual = processors.most_threads, processors.usual_threads
    what = ", ".join(filter(None, (processors.kinds, processors.limit)))
    if wanted > most:
        return warn(
            "threads", f"`threads` is {wanted}, but only {most} can run at once ({what}): steps wait for the rest",
            "unset it (LOCALRUN_THREADS, or `threads` in localrun.toml), or give this process more processors",
        )  # fmt: skip
    if wanted:
        return ok("threads", f"{wanted}, because `threads` is set ({what})")
    text = f"{usual} ({what})"
    here = [each for each in kept if each.processors == processors.identity]
    if here:
        newest = sorted(here, key=lambda each: each.at_s)[-MAX_MODELS:]
        found = "; ".join(
            f"{each.model} {each.threads.decode} for streams and {each.threads.prompt} for prompts" for each in newest
        )
        return ok("threads", f"{text}; measured: {found}")
    others = sorted({each.n_threads for each in processors.candidates()} - {usual})
    if others:
        shown = ", ".join(map(str, others))
        return ok("threads", f"{text}; an engine also tries {shown} when it is idle after its first load")
    return ok("threads", text)
