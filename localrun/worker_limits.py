"""The limits that a worker process sets itself, for good, once everything is imported and open.

Does not: anything on Windows, which has no resource limits; the daemon's time limit remains there.
"""

from __future__ import annotations

import math
import sys

if sys.platform != "win32":
    import resource


def close_limits(*, memory_bytes: int, file_bytes: int = 0) -> None:
    """Bound memory, and forbid new descriptors, processes, core dumps and files that grow beyond `file_bytes`. A limit
    that a system does not know, or does not let us lower, is left."""
    if sys.platform == "win32":
        return
    limits = {
        "RLIMIT_AS": memory_bytes,
        "RLIMIT_NOFILE": 0,
        "RLIMIT_NPROC": 0,
        "RLIMIT_FSIZE": file_bytes,
        "RLIMIT_CORE": 0,
    }
    for name, value in limits.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            try:
                resource.setrlimit(kind, (value, value))
            except (ValueError, OSError):
                continue


def allow_cpu(cpu_s: int) -> None:
    """Let the process use `cpu_s` seconds from now; beyond them the system ends it."""
    if sys.platform == "win32":
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + cpu_s, hard))
