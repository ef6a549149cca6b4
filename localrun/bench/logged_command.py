"""Runs a long command with its output in a log file, and reports its progress."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

LOG_TAIL_LINES = 15

# `[ 12%] Building ...` of make, `[12/193] Building ...` of ninja.
_PROGRESS = re.compile(r"^\[\s*(?:(\d+)%|(\d+)/(\d+))\]")


def run_logged(command: list[str], log_path: Path, on_progress: Callable[[str], None]) -> str:
    """Empty when the command ended well; else what happened, with the end of its output.

    `on_progress` is called each time a build has got ten percent further. The output is appended to `log_path`.
    """
    tail: list[str] = []
    reported_percent = 0
    with log_path.open("a", encoding="utf-8") as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, encoding="utf-8", errors="replace",
            )  # fmt: skip
        except OSError as error:
            return f"{command[0]} cannot be started: {error}"
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                tail = [*tail, line.rstrip()][-LOG_TAIL_LINES:]
                percent = percent_done(line)
                if percent is not None and percent // 10 > reported_percent // 10:
                    reported_percent = percent
                    on_progress(f"{percent} % done")
    if process.returncode == 0:
        return ""
    shown = "".join(f"\n  {line}" for line in tail)
    return f"status {process.returncode}; the end of {log_path}:{shown}"


def percent_done(line: str) -> int | None:
    """How far a build is, by a line of its output; None for a line that does not say."""
    found = _PROGRESS.match(line)
    if found is None:
        return None
    percent, done, total = found.groups()
    return int(percent) if percent else 100 * int(done) // max(1, int(total))
