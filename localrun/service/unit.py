"""The systemd user unit of a plan. Pure: one text for one plan.

What it may do is as little as the daemon needs. Everything is readable, since a model may lie anywhere; only
the daemon's own folders, the caches of GPU drivers and temporary folders are writable. Where the kernel lets no user
make namespaces, systemd leaves these path rules out and keeps the others.

Left out on purpose: MemoryDenyWriteExecute (ctypes callbacks and GPU drivers make code at run time), PrivateDevices
(the GPUs), PrivateTmp (a model may be named by a path in /tmp), MemoryMax (engines measure the memory there is).
"""

from __future__ import annotations

import re

from localrun.service.plan import ServicePlan

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
