"""The daemon as a task of the Windows task scheduler, through schtasks. Never run on Windows itself.

The scheduler knows neither environments nor logs, so a task runs this module, `python -m localrun.service.windows
START.json`, which reads both from a small JSON file (`start_file`). The daemon runs in that very process, so ending the
task ends the daemon.

Runs in the command line. Does not: need an administrator.
"""

from __future__ import annotations

import csv
import ctypes
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec

from localrun import stored
from localrun.config import Folders
from localrun.errors import NotSupported, ServiceFailed
from localrun.service.manager import CommandResult, ServicePlan, ServiceState, remove_file, run_command, show_tail

if sys.platform == "win32":
    import msvcrt

NAME = "localrun"
_FIRST_HANDLE = -10  # Windows numbers input, output and errors downwards from here


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What `main` reads. `arguments` are those after the program's name."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    log: str


def start_file(plan: ServicePlan) -> bytes:
    """The JSON of a plan for `main`."""
    arguments = plan.command[plan.command.index("localrun") + 1 :]
    start = Start(arguments=tuple(arguments), environment=plan.environment, log=str(plan.log))
    return msgspec.json.format(msgspec.json.encode(start, order="sorted"), indent=2) + b"\n"


def task(plan: ServicePlan, *, user: str, start_path: Path) -> str:
    """The XML that `schtasks /create /xml` reads; `user` is DOMAIN\\name, `start_path` where `start_file` lies. At
    logon, as the user, without a window."""
    program = plan.command[0]
    # The same interpreter without a console window.
    if program.lower().endswith("python.exe"):
        program = program[: -len("python.exe")] + "pythonw.exe"
    arguments = ["-P", "-m", "localrun.service.windows", str(start_path)]
    # Priority 5 is a normal program's; the scheduler's own default is below that. No time limit, also on batteries.
    xml = resources.files("localrun.service").joinpath("task.xml").read_text(encoding="utf-8")
    return xml.format(user=escape(user), program=escape(program), arguments=escape(subprocess.list2cmdline(arguments)))


# Columns of `schtasks /query /v /fo csv`. The words in them are translated; the result of a task that runs is a number
# in every language.
_STATUS_COLUMN, _RESULT_COLUMN = 3, 6
_IS_RUNNING = "267009"


class TaskScheduler:
    """See `Manager`. `path` is the file that the task starts by; the task itself is in the scheduler's store."""

    name = "the task scheduler"

    def __init__(self, *, folders: Folders, environ: Mapping[str, str]) -> None:
        self.path = folders.state / "service.json"
        self._xml_path = folders.state / "service.xml"
        self._log = folders.state / "service.log"
        self._user = "\\".join(part for part in (environ.get("USERDOMAIN", ""), environ.get("USERNAME", "")) if part)

    def install(self, plan: ServicePlan) -> None:
        self._require()
        if not self._user:
            raise NotSupported("USERNAME is not set, so the account whose logon starts the service is unknown; set it")
        stored.replace(self.path, start_file(plan))
        # The scheduler reads UTF-16, and copies what it reads.
        xml = task(plan, user=self._user, start_path=self.path)
        stored.replace(self._xml_path, xml.encode("utf-16"))
        try:
            run_command("schtasks", "/end", "/tn", NAME)
            self._do("/create", "/tn", NAME, "/xml", str(self._xml_path), "/f")
        finally:
            remove_file(self._xml_path)
        self._do("/run", "/tn", NAME)

    def state(self) -> ServiceState:
        """The scheduler does not tell process ids."""
        self._require()
        ran = run_command("schtasks", "/query", "/tn", NAME, "/v", "/fo", "csv", "/nh")
        if ran.status:
            return ServiceState(False, False, "not installed")
        rows = list(csv.reader(io.StringIO(ran.output)))
        if not rows or len(rows[0]) <= _RESULT_COLUMN:
            return ServiceState(True, False, "unknown")
        return ServiceState(True, rows[0][_RESULT_COLUMN].strip() == _IS_RUNNING, rows[0][_STATUS_COLUMN])

    def show_logs(self, *, n_lines: int, follow: bool) -> int:
        return show_tail(self._log, n_lines=n_lines, follow=follow)

    def uninstall(self) -> bool:
        self._require()
        was_there = run_command("schtasks", "/query", "/tn", NAME).status == 0
        if was_there:
            run_command("schtasks", "/end", "/tn", NAME)
            self._do("/delete", "/tn", NAME, "/f")
        return remove_file(self.path) or was_there

    def _require(self) -> None:
        if run_command("schtasks", "/?").is_missing:
            raise NotSupported("schtasks is not installed; run `localrun serve` yourself")

    def _do(self, *arguments: str) -> CommandResult:
        ran = run_command("schtasks", *arguments)
        if ran.status:
            raise ServiceFailed(f"schtasks {arguments[0]} failed: {ran.said}")
        return ran


# --- in the task ---


def main(arguments: list[str]) -> None:
    """Does not return: ends with the daemon's status. Raises OSError and msgspec.DecodeError for a bad START.json."""
    start = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Start)
    log_path = Path(start.log)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    os.environ.update(start.environment)
    log = log_path.open("a", encoding="utf-8", buffering=1)
    sys.stdout = sys.stderr = log
    # Engines inherit descriptor 2, not Python's objects. Without a console none of the standard ones may be open.
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
        if sys.platform == "win32":  # where they inherit a handle, which a program without a console has none of
            ctypes.windll.kernel32.SetStdHandle(_FIRST_HANDLE - descriptor, msvcrt.get_osfhandle(descriptor))
    sys.argv = ["localrun", *start.arguments]
    runpy.run_module("localrun", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
