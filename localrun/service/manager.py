"""What every service manager can do for the daemon, and which one this system has."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from localrun.config import Folders
from localrun.errors import NotSupported
from localrun.service.plan import ServicePlan


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


def manager(folders: Folders, *, platform: str = sys.platform, home: Path, environ: Mapping[str, str]) -> Manager:
    """The service manager of this system. Raises NotSupported on a system that has none of the three."""
    if platform == "darwin":
        from localrun.service.launchd import Launchd

        return Launchd(home=home, log=folders.state / "service.log")
    if platform == "win32":
        from localrun.service.windows import TaskScheduler

        return TaskScheduler(folders=folders, environ=environ)
    if platform.startswith("linux"):
        from localrun.service.systemd import Systemd

        return Systemd(home=home, environ=environ)
    raise NotSupported(f"localrun knows no service manager of {platform}; start `localrun serve` with its own means")
