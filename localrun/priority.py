"""Steps back behind whoever answers somebody: a lower priority that counts.

A process that was started in a session of its own, as the daemon's children are, is in a scheduling group of its own on
Linux desktops (`sched_autogroup_enabled`): groups share the processors alike, and niceness counts only inside of one.
A probe of the kernels at niceness 19 halved the engine beside it until its group stepped back, too.

Does not: raise a priority, or change that of a session it shares with others (only leaders of sessions step back as a
group).
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import psutil


def step_back(niceness: int, *, proc: Path = Path("/proc")) -> None:
    """Raise this process's niceness, from 0 to 19, for itself and what it starts. What the system refuses is left."""
    process = psutil.Process()
    with contextlib.suppress(OSError, psutil.Error):
        if sys.platform == "win32":
            process.nice(psutil.IDLE_PRIORITY_CLASS)
            return
        process.nice(niceness)
    if sys.platform == "linux" and os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            (proc / "self" / "autogroup").write_text(str(niceness), "ascii")
