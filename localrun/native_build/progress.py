"""A long build shown as one line, with its output in a log file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

# Ninja's count of steps, or Make's percentage. CMake's tests of the compiler have a few steps of their own.
_STEP = re.compile(r"^\s*\[\s*(\d+)(?:/(\d+)|%)\]")
_LEAST_STEPS = 20
_SAYS_WHY = re.compile(r"error: |undefined reference|No space left|Could not find|No matching distribution", re.I)
_N_REASONS = 5
_N_LAST_LINES = 5
# Time left is a guess from what has gone by; before this it would be a wild one.
_LEAST_S = 10.0


class Progress:
    """On a terminal one line that is written again and again; elsewhere a line for every ten percent. Time is an
    argument."""

    def __init__(self, out: TextIO, now_s: float) -> None:
        self._out = out
        self._is_terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        self._began_s = now_s
        self._percent = -1
        self._show("fetching llama.cpp and what builds it")

    def see(self, line: str, now_s: float) -> None:
        """A line of the build's output."""
        found = _STEP.match(line)
        if found is None:
            return
        n_done, n_all = int(found[1]), int(found[2] or 100)
        if n_all < _LEAST_STEPS or n_done > n_all:
            return
        if self._percent < 0:
            self._began_s, self._percent = now_s, 0
        percent = n_done * 100 // n_all
        if self._is_terminal or percent // 10 > self._percent // 10:
            self._show(f"compiling llama.cpp: {percent} %{self._left(n_done, n_all, now_s)}")
            self._percent = percent

    def end(self) -> None:
        """Clears the line, for what is written next."""
        if self._is_terminal:
            self._out.write("\r\x1b[2K")
            self._out.flush()

    def _left(self, n_done: int, n_all: int, now_s: float) -> str:
        gone_s = now_s - self._began_s
        if n_done in (0, n_all) or gone_s < _LEAST_S:
            return ""
        seconds = gone_s * (n_all - n_done) / n_done
        minutes = round(seconds / 60)
        if seconds < 50:
            return " (less than a minute left)"
        return f" (about {max(1, minutes)} minute{'' if minutes <= 1 else 's'} left)"

    def _show(self, text: str) -> None:
        if self._is_terminal:
            self._out.write(f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}")
        else:
            self._out.write(f"{text}\n")
        self._out.flush()


def run_with_progress(command: Sequence[str], environ: Mapping[str, str], log: Path) -> int:
    """The status of a build whose output goes into the log."""
    progress = Progress(sys.stderr, time.monotonic())
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, encoding="utf-8", errors="replace",
        ) as build,
    ):  # fmt: skip
        assert build.stdout is not None
        try:
            for line in build.stdout:
                file.write(line)
                progress.see(line, time.monotonic())
        finally:
            progress.end()
    return build.returncode


def reasons(log: Path) -> list[str]:
    """The lines of a failed build's log that say why, and its last ones."""
    lines = [line.strip()[:200] for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    said = [line for line in lines[:-_N_LAST_LINES] if _SAYS_WHY.search(line)][:_N_REASONS]
    return [*said, *lines[-_N_LAST_LINES:]]
