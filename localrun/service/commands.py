"""Runs the commands of a service manager: systemctl, launchctl, schtasks, found on PATH.

Does not: use a shell, or decide anything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import NamedTuple

TIMEOUT_S = 90.0


class Ran(NamedTuple):
    """`status` is 127 for a command that is not installed."""

    status: int
    output: str
    problem: str

    @property
    def is_missing(self) -> bool:
        return self.status == 127

    @property
    def said(self) -> str:
        """What it said about a failure, in one line."""
        lines = (self.problem or self.output).split("\n")
        return " ".join(line.strip() for line in lines if line.strip()) or f"it ended with status {self.status}"


def run(*command: str, timeout_s: float = TIMEOUT_S) -> Ran:
    """Run a command and take what it prints, in English."""
    program = shutil.which(command[0])
    if program is None:
        return Ran(127, "", f"{command[0]} is not installed")
    try:
        ended = subprocess.run(
            [program, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False, env=os.environ | {"LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Ran(124, "", f"{command[0]} did not end within {timeout_s:g} s")
    return Ran(ended.returncode, ended.stdout, ended.stderr)


def show(*command: str) -> int:
    """Run a command that writes to this terminal; its status, 127 when it is not installed."""
    program = shutil.which(command[0])
    if program is None:
        return 127
    return subprocess.run([program, *command[1:]], stdin=subprocess.DEVNULL, check=False).returncode
