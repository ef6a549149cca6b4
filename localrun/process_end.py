"""How a process ended, for a message."""

from __future__ import annotations

import re
import signal


def end_in_words(returncode: int | None) -> str:
    """How a process ended, for a message: the signal by its name, or the exit status."""
    if returncode is None:
        return "did not report how it ended"
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


# A line of a backtrace, as libc and debuggers write them.
_FRAME = re.compile(r"#\d|\[New LWP|.*\[0x[0-9a-f]+\]$|\s")


def last_words(said: str) -> str:
    """What follows that: the last line of its stderr that says something; empty where none does."""
    lines = [line for line in said.splitlines() if line and not _FRAME.match(line)]
    return f"; its last words: {lines[-1][:200]}" if lines else ""
