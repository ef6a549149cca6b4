"""Memory and disk space."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from localrun.doctor.finding import Finding, fail, ok, size, warn

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
        return fail("memory", text, "end other programs, or give this container more: no model can be loaded")
    if available_bytes < LOW_MEMORY_BYTES:
        return warn("memory", text, "end other programs before loading larger models than the built-in one")
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
        return fail("disk", text, "make room, or choose another disk for models with LOCALRUN_MODELS")
    if free_bytes < LOW_DISK_BYTES:
        return warn("disk", text, "a model of 8B parameters takes 5 GB; make room, or set LOCALRUN_MODELS")
    return ok("disk", text)


def check_cache_disk(folder: Path, free_bytes: int, *, kv_limit_bytes: int, kv_used_bytes: int) -> Iterator[Finding]:
    """`folder` is the cache folder, perhaps on another disk than models: small files go there, and the KV cache, which
    may still grow to its limit. Nothing is said while there is room."""
    to_come_bytes = kv_limit_bytes - kv_used_bytes
    if free_bytes < FULL_DISK_BYTES:
        yield fail("disk", f"{size(free_bytes)} free at {folder}", "make room, or move all folders with LOCALRUN_HOME")
    elif to_come_bytes > free_bytes:
        yield warn(
            "disk", f"the KV cache may take {size(to_come_bytes)} more, which is more than is free at {folder}",
            "lower disk_cache_bytes (LOCALRUN_DISK_CACHE), or `localrun cache clear --disk`",
        )  # fmt: skip


def free_bytes(folder: Path) -> int:
    """Of the disk that the folder is on, or will be on."""
    return int(psutil.disk_usage(str(existing(folder))).free)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))
