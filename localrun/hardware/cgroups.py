"""What this process's cgroups leave it of the machine: the least of all on the way from its own up, in version 1 or 2.

A container's own cgroup may lie at the top of what it sees; that of a systemd unit with a limit does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def quota(root: Path) -> float | None:
    """Processors' worth of time; None without a limit."""
    quotas = [quota for folder in _folders(root, "cpu") if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def memory(root: Path) -> tuple[int, int] | None:
    """Bytes that are left, and bytes in all; None without a limit. Pages of files that can be dropped are left."""
    found = [memory for folder in _folders(root, "memory") if (memory := _memory(folder)) is not None]
    return (min(left for left, _ in found), min(limit for _, limit in found)) if found else None


def text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _quota(folder: Path) -> float | None:
    """Of one cgroup, of either version."""
    limit, _, period = (text_of(folder / "cpu.max") or "").strip().partition(" ")
    if not limit:
        limit, period = text_of(folder / "cpu.cfs_quota_us") or "", text_of(folder / "cpu.cfs_period_us") or ""
    try:
        quota_us, period_us = int(limit), int(period)
    except ValueError:  # no such files here, or the word "max"
        return None
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def _memory(folder: Path) -> tuple[int, int] | None:
    """Of one cgroup, of either version. Beyond `memory.high` nothing is killed, but all is held up."""
    said = [text_of(folder / name) or "" for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    used = text_of(folder / "memory.current") or text_of(folder / "memory.usage_in_bytes") or ""
    limit = min((int(text) for text in said if text.strip().isdecimal()), default=None)
    if limit is None or not used.strip().isdecimal():
        return None
    lines = (line.split() for line in (text_of(folder / "memory.stat") or "").splitlines())
    counts = {fields[0]: int(fields[1]) for fields in lines if len(fields) == 2 and fields[1].isdecimal()}
    # In version 1 those below are not counted under the plain names.
    dropped = sum(counts.get(f"total_{name}", counts.get(name, 0)) for name in ("inactive_file", "active_file"))
    return max(0, limit - int(used) + dropped), limit


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The cgroups that may limit this process: its own and all above it that can be seen."""
    own = dict(_own_cgroups(text_of(root / "proc/self/cgroup") or ""))
    for line in (text_of(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        if kind[0] == "cgroup" and controller not in kind[2].split(","):
            continue
        path = own.get("" if kind[0] == "cgroup2" else controller)
        if path is None:
            continue
        top = root / fields[4].replace("\\040", " ").lstrip("/")
        here = top / _below(path, fields[3])
        yield here
        while here != top:
            here = here.parent
            yield here


def _own_cgroups(text: str) -> Iterator[tuple[str, str]]:
    """Lines such as `1:cpu,cpuacct:/a/b`, and `0::/a/b` of version 2, as controller and path."""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            yield controller, path


def _below(path: str, mounted: str) -> PurePosixPath:
    """Where a cgroup is below the mount of `mounted`; the mount itself where that hides it, as in older containers."""
    if ".." in PurePosixPath(path).parts or not PurePosixPath(path).is_relative_to(mounted):
        return PurePosixPath()
    return PurePosixPath(path).relative_to(mounted)
