"""The systemd unit: its golden text, how it quotes, and what systemd itself says about it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localrun.cli import exits
from localrun.service.plan import ServicePlan
from localrun.service.unit import NAME, unit

GOLDEN = """\
# Written by `localrun service install`; make changes with `systemctl --user edit localrun`.
[Unit]
Description=localrun, language models on this machine
StartLimitIntervalSec=60
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart=/opt/localrun/bin/python -P -m localrun serve --port 11500
Environment=LOCALRUN_SLOTS=4
Restart=on-failure
RestartSec=2
RestartPreventExitStatus=2 3
TimeoutStartSec=60
TimeoutStopSec=30
# The daemon ends its engines in order; what is left after it is killed.
KillMode=mixed
# An engine that ran out of memory is the daemon's to start again.
OOMPolicy=continue
UMask=0077

NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths=-/h/data -/h/cache -/tmp -/var/tmp -%C -%h/.nv

[Install]
WantedBy=default.target
"""

Make = Callable[..., ServicePlan]


def line_of(text: str, key: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"{key}="))


def test_the_unit_of_a_plain_plan(make_plan: Make):
    assert unit(make_plan(written=(Path("/h/data"), Path("/h/cache")))) == GOLDEN


def test_it_does_not_start_again_after_what_stays_wrong(make_plan: Make):
    assert line_of(unit(make_plan()), "RestartPreventExitStatus") == (
        f"RestartPreventExitStatus={exits.USAGE} {exits.PORT_BUSY}"
    )


def test_words_are_quoted_as_systemd_reads_them(make_plan: Make):
    text = unit(
        make_plan(
            command=("/opt/my python", "-m", "localrun", "serve", "--origins", 'a$b%c"d\\e'),
            environment={"LOCALRUN_MODELS": "/my models/100%", "LOCALRUN_ORIGINS": "$HOME"},
            written=(Path("/with space"),),
        )
    )
    assert line_of(text, "ExecStart") == ('ExecStart="/opt/my python" -m localrun serve --origins "a$$b%%c\\"d\\\\e"')
    assert '\nEnvironment="LOCALRUN_MODELS=/my models/100%%"\n' in text
    # A dollar in Environment= is a dollar.
    assert '\nEnvironment="LOCALRUN_ORIGINS=$HOME"\n' in text
    assert line_of(text, "ReadWritePaths").startswith('ReadWritePaths="-/with space" ')


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_it(make_plan: Make, tmp_path: Path):
    path = tmp_path / NAME
    command = (sys.executable, "-P", "-m", "localrun", "serve", "--origins", 'a "b" 100%')
    path.write_text(unit(make_plan(command=command, written=(tmp_path / "with space",))))
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    verified = subprocess.run(
        ["systemd-analyze", "--user", "verify", "--man=no", str(path)],
        capture_output=True, text=True, env=environ, check=False,
    )  # fmt: skip
    complaints = [line for line in verified.stderr.splitlines() if "localrun" in line]
    assert (verified.returncode, complaints) == (0, [])
    path.write_text(path.read_text().replace("Restart=on-failure", "Restart=perhaps"))
    broken = subprocess.run(
        ["systemd-analyze", "--user", "verify", "--man=no", str(path)],
        capture_output=True, text=True, env=environ, check=False,
    )  # fmt: skip
    assert "perhaps" in broken.stderr, "systemd-analyze would not have told"
