"""The daemon as a unit of the user's systemd, through systemctl and journalctl.

Runs in the command line. Does not: make the unit (unit.py), or need special rights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from localrun.errors import NotSupported, ServiceFailed
from localrun.service import commands, file
from localrun.service.commands import Ran
from localrun.service.manager import ServiceState
from localrun.service.plan import ServicePlan
from localrun.service.unit import NAME, unit

_PROPERTIES = ("LoadState", "ActiveState", "SubState", "MainPID", "Result", "NRestarts")
_INSTEAD = "run `localrun serve` yourself, or as the command of the container"


class Systemd:
    """`kernel` holds the text by which WSL is known, `booted` exists where systemd is the first process."""

    name = "systemd"

    def __init__(
        self,
        *,
        home: Path,
        environ: Mapping[str, str],
        kernel: Path = Path("/proc/version"),
        booted: Path = Path("/run/systemd/system"),
    ) -> None:
        base = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
        self.path = base / "systemd" / "user" / NAME
        self._environ = environ
        self._kernel = kernel
        self._booted = booted

    def install(self, plan: ServicePlan) -> None:
        """See `Manager`. The folders that the unit may write to are made first: it cannot make them itself."""
        self._require()
        for folder in plan.written:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_private(self.path, unit(plan).encode())
        self._do("daemon-reload")
        # Forgets earlier failures, which would count towards the limit of starts.
        commands.run("systemctl", "--user", "reset-failed", NAME)
        self._do("enable", NAME)
        ran = commands.run("systemctl", "--user", "restart", NAME)
        if ran.status:
            raise ServiceFailed(f"the service does not start: {ran.said}; `localrun service logs` shows why")

    def state(self) -> ServiceState:
        """See `Manager`."""
        self._require()
        ran = self._do("show", NAME, "--property=" + ",".join(_PROPERTIES))
        values = dict(line.partition("=")[::2] for line in ran.output.splitlines() if "=" in line)
        active = values.get("ActiveState", "unknown")
        detail = f"{active} ({values.get('SubState', '')})"
        if active == "failed":
            detail += f", {values.get('Result', '')}"
        if values.get("NRestarts", "0") not in ("", "0"):
            detail += f", restarted {values['NRestarts']} times"
        pid = values.get("MainPID", "0")
        is_installed = self.path.is_file() or values.get("LoadState") == "loaded"
        return ServiceState(is_installed, active == "active", detail, int(pid) if pid.isdigit() and int(pid) else None)

    def show_logs(self, *, n_lines: int, follow: bool) -> int:
        """See `Manager`. The journal keeps them."""
        more = ["--follow"] if follow else []
        status = commands.show("journalctl", "--user", "--unit", NAME, "--lines", str(n_lines), "--no-pager", *more)
        if status == 127:
            raise NotSupported(f"journalctl is not installed, so there is no journal to show; {_INSTEAD}")
        return status

    def uninstall(self) -> bool:
        """See `Manager`. Without systemd, a file that was left is removed all the same."""
        problem = self._problem()
        if problem is not None:
            if file.remove(self.path):
                return True
            raise problem
        was_there = self.path.is_file()
        if was_there:
            self._do("disable", "--now", NAME)
            file.remove(self.path)
            self._do("daemon-reload")
            commands.run("systemctl", "--user", "reset-failed", NAME)
        return was_there

    def _do(self, *arguments: str) -> Ran:
        ran = commands.run("systemctl", "--user", *arguments)
        if ran.status:
            raise ServiceFailed(f"systemctl --user {arguments[0]} failed: {ran.said}")
        return ran

    def _require(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise problem

    def _problem(self) -> NotSupported | None:
        """What keeps the user's systemd from being there, with the way out."""
        ran = commands.run("systemctl", "--user", "show", "--property=Version")
        if ran.status == 0:
            return None
        if self._is_wsl():
            return NotSupported(
                "this WSL distribution runs without systemd; put `[boot]` and `systemd=true` into /etc/wsl.conf, run "
                "`wsl --shutdown` in Windows and try again, or run `localrun serve` yourself"
            )
        if ran.is_missing:
            return NotSupported(f"there is no systemd here (systemctl is not installed); {_INSTEAD}")
        if "not been booted with systemd" in ran.said or not self._booted.is_dir():
            return NotSupported(f"systemd does not run here, as in most containers ({ran.said}); {_INSTEAD}")
        user = self._environ.get("USER") or "USER"
        return NotSupported(
            f"the user's own systemd cannot be reached ({ran.said}); log in directly instead of by su or sudo, or run "
            f"`sudo loginctl enable-linger {user}` and set XDG_RUNTIME_DIR=/run/user/$(id -u)"
        )

    def _is_wsl(self) -> bool:
        try:
            return "microsoft" in self._kernel.read_text(encoding="utf-8", errors="replace").lower()
        except OSError:
            return False
