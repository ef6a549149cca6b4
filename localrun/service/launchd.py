"""The daemon as an agent of launchd, through launchctl.

Runs in the command line. Does not: need special rights.
"""

from __future__ import annotations

import os
import plistlib
import re
import time
from pathlib import Path

from localrun import stored
from localrun.errors import NotSupported, ServiceFailed
from localrun.service.manager import CommandResult, ServicePlan, ServiceState, remove_file, run_command, show_tail

LABEL = "localrun.daemon"
_UMASK = 0o077


def agent(plan: ServicePlan) -> bytes:
    """The property list of a plan, as XML."""
    content = {
        "Label": LABEL,
        "ProgramArguments": list(plan.command),
        "EnvironmentVariables": dict(sorted(plan.environment.items())),
        "RunAtLoad": True,
        # Again after a crash, not after an orderly end, nor where a wrong setting or a busy port would end it at once.
        "KeepAlive": {"Crashed": True},
        "ThrottleInterval": 10,
        "ExitTimeOut": 30,
        # Otherwise macOS slows the engines down as background work.
        "ProcessType": "Interactive",
        "Umask": _UMASK,
        "StandardOutPath": str(plan.log),
        "StandardErrorPath": str(plan.log),
    }
    return plistlib.dumps(content, sort_keys=True)


_PID = re.compile(r"^\s*pid = (\d+)$", re.MULTILINE)
_STATE = re.compile(r"^\s*state = (.+)$", re.MULTILINE)
_EXIT = re.compile(r"^\s*last exit code = (\d+)", re.MULTILINE)
# `bootout` may return before the agent is gone, and `bootstrap` then refuses.
_N_TRIES = 20
_TRY_EVERY_S = 0.25


class Launchd:
    """See `Manager`. `log` is where launchd puts the daemon's output."""

    name = "launchd"

    def __init__(self, *, home: Path, log: Path) -> None:
        self.path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self._log = log
        self._domain = f"gui/{os.getuid() if hasattr(os, 'getuid') else 0}"

    def install(self, plan: ServicePlan) -> None:
        if self._print().is_missing:
            raise NotSupported("launchctl is not installed; run `localrun serve` yourself")
        plan.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._boot_out()
        stored.replace(self.path, agent(plan))
        run_command("launchctl", "enable", f"{self._domain}/{LABEL}")
        ran = run_command("launchctl", "bootstrap", self._domain, str(self.path))
        if ran.status:
            raise ServiceFailed(
                f"launchctl bootstrap failed: {ran.said}; log in at the Mac itself rather than by ssh, and try again"
            )

    def state(self) -> ServiceState:
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
        return show_tail(self._log, n_lines=n_lines, follow=follow)

    def uninstall(self) -> bool:
        was_loaded = self._boot_out()
        return remove_file(self.path) or was_loaded

    def _print(self) -> CommandResult:
        return run_command("launchctl", "print", f"{self._domain}/{LABEL}")

    def _boot_out(self) -> bool:
        """Whether it was loaded. Raises ServiceFailed when it stays."""
        if self._print().status:
            return False
        ran = run_command("launchctl", "bootout", f"{self._domain}/{LABEL}")
        for _ in range(_N_TRIES):
            if self._print().status:
                return True
            time.sleep(_TRY_EVERY_S)
        raise ServiceFailed(f"launchctl bootout did not end the running agent: {ran.said}; try again in a minute")
