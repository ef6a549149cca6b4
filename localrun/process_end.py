"""How a process ended, for a message."""

from __future__ import annotations

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
