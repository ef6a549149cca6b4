"""The daemon as an agent of launchd, through launchctl.

Runs in the command line. Does not: make the property list (agent.py), or need special rights.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from localrun.errors import NotSupported, ServiceFailed
from localrun.service import commands, file
from localrun.service.agent import LABEL, agent
from localrun.service.manager import ServiceState
from localrun.service.plan import ServicePlan

_PID = re.compile(r"^\s*pid = (\d+)$", re.MULTILINE)
_STATE = re.compile(r"^\s*state = (.+)$", re.MULTILINE)
_EXIT = re.compile(r"^\s*last exit code = (\d+)", re.MULTILINE)
# `bootout` may return before the agent is gone, and `bootstrap` then refuses.
_N_TRIES = 20
_TRY_EVERY_S = 0.25


class Launchd:
    """`log` is where launchd puts the daemon's output."""

    name = "launchd"

    def __init__(self, *, home: Path, log: Path) -> None:
        self.path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self._log = log
        self._domain = f"gui/{os.getuid() if hasattr(os, 'getuid') else 0}"

    def install(self, plan: ServicePlan) -> None:
        """See `Manager`."""
        if self._print().is_missing:
            raise NotSupported("launchctl is not installed; run `localrun serve` yourself")
        plan.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._boot_out()
        file.write_private(self.path, agent(plan))
        commands.run("launchctl", "enable", f"{self._domain}/{LABEL}")
        ran = commands.run("launchctl", "bootstrap", self._domain, str(self.path))
        if ran.status:
            raise ServiceFailed(
                f"launchctl bootstrap failed: {ran.said}; log in at the Mac itself rather than by ssh, and try again"
            )

    def state(self) -> ServiceState:
        """See `Manager`."""
        ran = self._print()
        if ran.is_missing:
            raise NotSupported("launchctl is not installed; run `localrun serve` yourself")
        if ran.status:
            return ServiceState(self.path.is_file(), False, "not loaded")
        state, pid, ended = _STATE.search(ran.output), _PID.search(ran.output), _EXIT.search(ran.output)
        detail = state[1] if state else "loaded"
        if ended and ended[1] != "0":
            detail += f", last exit code {ended[1]}"
        return ServiceState(True, pid is not None, detail, int(pid[1]) if pid else None)

    def show_logs(self, *, n_lines: int, follow: bool) -> int:
        """See `Manager`."""
        return file.show_tail(self._log, n_lines=n_lines, follow=follow)

    def uninstall(self) -> bool:
        """See `Manager`."""
        was_loaded = self._boot_out()
        return file.remove(self.path) or was_loaded

    def _print(self) -> commands.Ran:
        return commands.run("launchctl", "print", f"{self._domain}/{LABEL}")

    def _boot_out(self) -> bool:
        """Whether it was loaded. Raises ServiceFailed when it stays."""
        if self._print().status:
            return False
        ran = commands.run("launchctl", "bootout", f"{self._domain}/{LABEL}")
        for _ in range(_N_TRIES):
            if self._print().status:
                return True
            time.sleep(_TRY_EVERY_S)
        raise ServiceFailed(f"launchctl bootout did not end the running agent: {ran.said}; try again in a minute")
