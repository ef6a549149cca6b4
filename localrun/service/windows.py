"""The daemon as a task of the Windows task scheduler, through schtasks. Never run on Windows itself.

Runs in the command line. Does not: make the task (task.py), or need an administrator.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from localrun.config import Folders
from localrun.errors import NotSupported, ServiceFailed
from localrun.service import commands, file
from localrun.service.commands import Ran
from localrun.service.manager import ServiceState
from localrun.service.plan import ServicePlan
from localrun.service.task import NAME, start_file, task

_STATUS_COLUMN = 2  # of `schtasks /query /fo csv`, in every language: name, next run, status


class TaskScheduler:
    """`path` is the file that the task starts by; the task itself is in the scheduler's store."""

    name = "the task scheduler"

    def __init__(self, *, folders: Folders, environ: Mapping[str, str]) -> None:
        self.path = folders.state / "service.json"
        self._xml_path = folders.state / "service.xml"
        self._log = folders.state / "service.log"
        self._user = "\\".join(part for part in (environ.get("USERDOMAIN", ""), environ.get("USERNAME", "")) if part)

    def install(self, plan: ServicePlan) -> None:
        """See `Manager`."""
        self._require()
        if not self._user:
            raise NotSupported("USERNAME is not set, so there is no account to start at the logon of; set it")
        file.write_private(self.path, start_file(plan))
        # The scheduler reads UTF-16, and copies what it reads.
        xml = task(plan, user=self._user, start_path=self.path)
        file.write_private(self._xml_path, xml.encode("utf-16"))
        try:
            commands.run("schtasks", "/end", "/tn", NAME)
            self._do("/create", "/tn", NAME, "/xml", str(self._xml_path), "/f")
        finally:
            file.remove(self._xml_path)
        self._do("/run", "/tn", NAME)

    def state(self) -> ServiceState:
        """See `Manager`. The scheduler does not tell process ids."""
        self._require()
        ran = commands.run("schtasks", "/query", "/tn", NAME, "/fo", "csv", "/nh")
        if ran.status:
            return ServiceState(False, False, "not installed")
        rows = list(csv.reader(io.StringIO(ran.output)))
        detail = rows[0][_STATUS_COLUMN] if rows and len(rows[0]) > _STATUS_COLUMN else "unknown"
        return ServiceState(True, detail == "Running", detail)

    def show_logs(self, *, n_lines: int, follow: bool) -> int:
        """See `Manager`."""
        return file.show_tail(self._log, n_lines=n_lines, follow=follow)

    def uninstall(self) -> bool:
        """See `Manager`."""
        self._require()
        was_there = commands.run("schtasks", "/query", "/tn", NAME).status == 0
        if was_there:
            commands.run("schtasks", "/end", "/tn", NAME)
            self._do("/delete", "/tn", NAME, "/f")
        return file.remove(self.path) or was_there

    def _require(self) -> None:
        if commands.run("schtasks", "/?").is_missing:
            raise NotSupported("schtasks is not installed; run `localrun serve` yourself")

    def _do(self, *arguments: str) -> Ran:
        ran = commands.run("schtasks", *arguments)
        if ran.status:
            raise ServiceFailed(f"schtasks {arguments[0]} failed: {ran.said}")
        return ran
