"""The daemon as a unit of the user's systemd, through systemctl and journalctl.

`unit` makes the text of the unit, a pure function. What it may do is as little as the daemon needs: everything is
readable, since a model may lie anywhere; only the daemon's own folders, the caches of GPU drivers and temporary folders
are writable. Where the kernel lets no user make namespaces, systemd leaves these path rules out and keeps the others.

Left out on purpose: MemoryDenyWriteExecute (ctypes callbacks and GPU drivers make code at run time), PrivateDevices
(the GPUs), PrivateTmp (a model may be named by a path in /tmp), MemoryMax (engines measure the memory there is).

Runs in the command line. Does not: need special rights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from localrun import stored
from localrun.errors import NotSupported, ServiceFailed
from localrun.service.manager import CommandResult, ServicePlan, ServiceState, remove_file, run_command, show_command

NAME = "localrun.service"
# Exit codes of the command line that starting again does not change: a wrong setting, a port that somebody has.
_FINAL_STATUSES = "2 3"
_SAFE_WORD = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
# Paths of the unit's own, which need not exist: temporary folders, and where drivers keep compiled kernels.
_ALSO_WRITTEN = ("-/tmp", "-/var/tmp", "-%C", "-%h/.nv")


def unit(plan: ServicePlan) -> str:
    """The text of the unit file."""
    environment = [f"Environment={_quoted(f'{name}={value}')}" for name, value in sorted(plan.environment.items())]
    written = [_quoted(f"-{path}") for path in plan.written]
    return "\n".join(
        [
            "# Written by `localrun service install`; make changes with `systemctl --user edit localrun`.",
            "[Unit]",
            "Description=localrun, language models on this machine",
            "StartLimitIntervalSec=60",
            "StartLimitBurst=5",
            "",
            "[Service]",
            "Type=notify",
            "NotifyAccess=main",
            f"ExecStart={' '.join(_argument(word) for word in plan.command)}",
            *environment,
            "Restart=on-failure",
            "RestartSec=2",
            f"RestartPreventExitStatus={_FINAL_STATUSES}",
            "TimeoutStartSec=60",
            "TimeoutStopSec=30",
            "# The daemon ends its engines in order; what is left after it is killed.",
            "KillMode=mixed",
            "# An engine that ran out of memory is the daemon's to start again.",
            "OOMPolicy=continue",
            "UMask=0077",
            "",
            "NoNewPrivileges=yes",
            "LockPersonality=yes",
            "RestrictRealtime=yes",
            "RestrictSUIDSGID=yes",
            "RestrictNamespaces=yes",
            "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
            "SystemCallArchitectures=native",
            "SystemCallFilter=@system-service",
            "SystemCallErrorNumber=EPERM",
            "ProtectSystem=strict",
            "ProtectHome=read-only",
            f"ReadWritePaths={' '.join([*written, *_ALSO_WRITTEN])}",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
    )


def _argument(word: str) -> str:
    """A word of ExecStart: there, besides what `_quoted` sees to, a dollar begins a variable."""
    return _quoted(word).replace("$", "$$")


def _quoted(text: str) -> str:
    """As systemd reads it back; % begins a specifier."""
    doubled = text.replace("%", "%%")
    if _SAFE_WORD.fullmatch(doubled):
        return doubled
    return '"' + doubled.replace("\\", "\\\\").replace('"', '\\"') + '"'


_PROPERTIES = ("LoadState", "ActiveState", "SubState", "MainPID", "Result", "NRestarts")
_INSTEAD = "run `localrun serve` yourself, or as the command of the container"


class Systemd:
    """See `Manager`. `kernel` holds the text by which WSL is known; `booted` exists if systemd is the first process."""

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
        """The folders that the unit may write to are made first: it cannot make them itself."""
        self._require()
        for folder in plan.written:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        stored.replace(self.path, unit(plan).encode())
        self._do("daemon-reload")
        # Forgets earlier failures, which would count towards the limit of starts.
        run_command("systemctl", "--user", "reset-failed", NAME)
        self._do("enable", NAME)
        ran = run_command("systemctl", "--user", "restart", NAME)
        if ran.status:
            raise ServiceFailed(f"the service does not start: {ran.said}; `localrun service logs` shows why")

    def state(self) -> ServiceState:
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
        """The journal keeps them."""
        more = ["--follow"] if follow else []
        status = show_command("journalctl", "--user", "--unit", NAME, "--lines", str(n_lines), "--no-pager", *more)
        if status == 127:
            raise NotSupported(f"journalctl is not installed, so there is no journal to show; {_INSTEAD}")
        return status

    def uninstall(self) -> bool:
        """Without systemd, a file that was left is removed all the same."""
        problem = self._problem()
        if problem is not None:
            if remove_file(self.path):
                return True
            raise problem
        was_there = self.path.is_file()
        if was_there:
            self._do("disable", "--now", NAME)
            remove_file(self.path)
            self._do("daemon-reload")
            run_command("systemctl", "--user", "reset-failed", NAME)
        return was_there

    def _do(self, *arguments: str) -> CommandResult:
        ran = run_command("systemctl", "--user", *arguments)
        if ran.status:
            raise ServiceFailed(f"systemctl --user {arguments[0]} failed: {ran.said}")
        return ran

    def _require(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise problem

    def _problem(self) -> NotSupported | None:
        """What keeps the user's systemd from being there, with the way out."""
        ran = run_command("systemctl", "--user", "show", "--property=Version")
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
