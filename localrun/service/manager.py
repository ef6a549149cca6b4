"""What every service manager can do for the daemon, which one this system has, and what all of them are made with:
commands found on PATH, run without a shell, and the end of a log.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple, Protocol

from localrun.processes import SYSTEM_ENCODING, run_text
from localrun.service.plan import ServicePlan
from localrun.visible import visible

# --- commands: systemctl, launchctl, schtasks ---

TIMEOUT_S = 90.0


class CommandResult(NamedTuple):
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


def run_command(*command: str, timeout_s: float = TIMEOUT_S) -> CommandResult:
    """Run a command and take what it prints, in English."""
    program = shutil.which(command[0])
    if program is None:
        return CommandResult(127, "", f"{command[0]} is not installed")
    try:
        ended = run_text([program, *command[1:]], timeout_s, encoding=SYSTEM_ENCODING, env=os.environ | {"LC_ALL": "C"})
    except subprocess.TimeoutExpired:
        return CommandResult(124, "", f"{command[0]} did not end within {timeout_s:g} s")
    return CommandResult(ended.returncode, ended.stdout, ended.stderr)


def show_command(*command: str) -> int:
    """Run a command that writes to this terminal; its status, 127 when it is not installed."""
    program = shutil.which(command[0])
    if program is None:
        return 127
    return subprocess.run([program, *command[1:]], stdin=subprocess.DEVNULL, check=False).returncode


# --- their files, and the log that they do not keep ---

FOLLOW_EVERY_S = 0.5


def remove_file(path: Path) -> bool:
    """False when there was none. Raises OSError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def show_tail(path: Path, *, n_lines: int, follow: bool) -> int:
    """Prints the last lines of a log, and with `follow` those that come, until Ctrl-C. 1 when there is no log."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        print(f"there is no log yet; it will be {path}")
        return 1
    with file:
        print(visible("".join(deque(file, maxlen=n_lines))), end="", flush=True)
        while follow:
            text = file.read()
            if text:
                print(visible(text), end="", flush=True)
            time.sleep(FOLLOW_EVERY_S)
    return 0


class ServiceState(NamedTuple):
    """`detail` is the manager's own word for it. `pid` is None where it runs not, or the manager does not say."""

    is_installed: bool
    is_running: bool
    detail: str
    pid: int | None = None


class Manager(Protocol):
    """All raise NotSupported where the manager is not there, and ServiceFailed for what it refuses to do."""

    name: str
    path: Path

    def install(self, plan: ServicePlan) -> None:
        """Writes the service's file, starts it, and has it started with every session. Safe to repeat."""

    def state(self) -> ServiceState: ...

    def show_logs(self, *, n_lines: int, follow: bool) -> int:
        """Prints the last lines of the daemon's output. The exit status."""

    def uninstall(self) -> bool:
        """Stops the daemon and removes the file. False when there was nothing."""
