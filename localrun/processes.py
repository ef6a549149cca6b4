"""How other programs are started, how they ended, and how one steps back behind others: whatever differs from system to
system.

On Windows a program that is started by one without a console gets a window of its own, unless it is told otherwise;
the daemon has none, so whoever starts something passes `HIDDEN` (or is a command in somebody's terminal).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio.subprocess import Process

# Keyword arguments for whatever starts a process that nobody looks at, and for one that outlives whoever starts it.
# Not DETACHED_PROCESS: without any console, however hidden, its own children would open windows.
HIDDEN: dict[str, Any] = {}
DETACHED: dict[str, Any] = {"start_new_session": True}
# Of what the system's own programs write into a pipe.
SYSTEM_ENCODING = "utf-8"
if sys.platform == "win32":
    HIDDEN = {"creationflags": subprocess.CREATE_NO_WINDOW}
    DETACHED = {"creationflags": subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP}
    SYSTEM_ENCODING = "oem"


def run_text(
    command: Sequence[str], timeout_s: float, *, encoding: str = "utf-8", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a short program, with what it writes as text. Raises OSError and subprocess.TimeoutExpired."""
    if "input" not in options:
        options["stdin"] = subprocess.DEVNULL
    return subprocess.run(
        command, capture_output=True, encoding=encoding, errors="replace", timeout=timeout_s, check=False,
        **HIDDEN, **options,
    )  # fmt: skip


# A killed process that the system does not let go of, such as one that waits for a dead disk, is not waited for longer.
GONE_WITHIN_S = 10.0


async def end_child(child: Process, *, leave_s: float = 0.0) -> None:
    """Close a child's stdin, kill it if it is there after `leave_s`, and wait until the system has let go of it.

    Whoever is cancelled here waits, too, and is cancelled afterwards: a child that nobody waits for stays a zombie, and
    a loop that closes meanwhile never learns that it has ended.
    """
    import asyncio  # here, because commands of a terminal do without it

    if child.stdin is not None:
        child.stdin.close()
    loop = asyncio.get_running_loop()
    waiting, cancelled = loop.create_task(child.wait()), None
    for timeout_s in (leave_s, GONE_WITHIN_S):
        until_s = loop.time() + timeout_s
        while (left_s := until_s - loop.time()) > 0 and not waiting.done():
            try:
                await asyncio.wait({waiting}, timeout=left_s)
            except asyncio.CancelledError as error:
                cancelled = error
        with contextlib.suppress(ProcessLookupError):
            if child.returncode is None:
                child.kill()
    waiting.cancel()
    if cancelled is not None:
        raise cancelled


# What Windows ends a process with where other systems send a signal. Nothing else ends with such numbers.
_STATUSES = {
    0xC0000005: signal.SIGSEGV,  # access violation
    0xC00000FD: signal.SIGSEGV,  # stack overflow
    0xC0000006: signal.SIGSEGV,  # a page of a mapped file cannot be read
    0xC000001D: signal.SIGILL,
    0xC0000094: signal.SIGFPE,
    0xC0000409: signal.SIGABRT,  # a failed check, or abort()
    0xC0000374: signal.SIGABRT,  # damaged heap
    0xC000013A: signal.SIGINT,
    0x40010004: signal.SIGTERM,  # the session ended
}
# What a damaged file or a wrong kernel does to native code. Other ends (SIGKILL, SIGTERM) say nothing about either.
_CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL}) | {
    getattr(signal, "SIGBUS", signal.SIGSEGV)
}


def signal_of(returncode: int | None) -> int | None:
    """The number of the signal that ended a process, or that stands for what did; None if nothing of the kind."""
    if returncode is None or returncode < 0:
        return returncode and -returncode
    if returncode == 3 and sys.platform == "win32":  # abort() of older libraries
        return signal.SIGABRT
    return _STATUSES.get(returncode)


def signal_name(returncode: int | None) -> str:
    """Of `signal_of`, such as SIGSEGV; empty if nothing of the kind."""
    number = signal_of(returncode)
    try:
        return "" if number is None else signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_crash(returncode: int | None) -> bool:
    """Whether native code failed, and nobody else ended the process."""
    return signal_of(returncode) in _CRASHES


def end_in_words(returncode: int | None) -> str:
    """How a process ended, for a message: the signal by its name, or the exit status."""
    if returncode is None:
        return "did not report how it ended"
    name = signal_name(returncode)
    if returncode < 0:
        return f"was killed by {name}"
    status = f"0x{returncode:08X}" if returncode >= 1 << 30 else str(returncode)
    return f"exited with status {status}" + (f" ({name})" if name else "")


# A line of a backtrace, as libc and debuggers write them.
_FRAME = re.compile(r"#\d|\[New LWP|.*\[0x[0-9a-f]+\]$|\s")


def last_words(said: str) -> str:
    """What follows that: the last line of its stderr that says something; empty where none does."""
    lines = [line for line in said.splitlines() if line and not _FRAME.match(line)]
    return f"; its last words: {lines[-1][:200]}" if lines else ""


def step_back(niceness: int, *, proc: Path = Path("/proc")) -> None:
    """Raise this process's niceness, from 0 to 19, for itself and what it starts. What the system refuses is left.

    A process that was started in a session of its own, as the daemon's children are, is in a scheduling group of its
    own on Linux desktops (`sched_autogroup_enabled`): groups share the processors alike, and niceness counts only
    inside of one. A probe of the kernels at niceness 19 halved the engine beside it until its group stepped back, too.
    Only leaders of sessions step back as a group.
    """
    import psutil  # here, because commands of a terminal do without it

    process = psutil.Process()
    with contextlib.suppress(OSError, psutil.Error):
        if sys.platform == "win32":
            process.nice(psutil.IDLE_PRIORITY_CLASS)
            return
        process.nice(niceness)
    if sys.platform == "linux" and os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            (proc / "self" / "autogroup").write_text(str(niceness), "ascii")
