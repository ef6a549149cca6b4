"""Which service manager this system has."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from localrun.config import Folders
from localrun.errors import NotSupported
from localrun.service.manager import Manager


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
    raise NotSupported(
        f"localrun does not know the service manager of {platform}; start `localrun serve` by its own means"
    )
