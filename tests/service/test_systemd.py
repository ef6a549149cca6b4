"""systemctl and journalctl, as far as the daemon's service asks them."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localrun.cli import exits
from localrun.errors import NotSupported, ServiceFailed
from localrun.service.manager import ServicePlan
from localrun.service.systemd import NAME, Systemd, unit

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


SHOW = "systemctl --user show localrun.service"


@pytest.fixture
def systemd(fakes, tmp_path: Path) -> Systemd:
    fakes.add("systemctl")
    fakes.add("journalctl")
    kernel, booted = tmp_path / "version", tmp_path / "booted"
    kernel.write_text("Linux version 6.1")
    booted.mkdir()
    return Systemd(home=tmp_path / "home", environ={"USER": "kim"}, kernel=kernel, booted=booted)


def test_install_writes_the_unit_and_starts_it_by_these_commands(systemd, fakes, make_plan):
    plan = make_plan()
    systemd.install(plan)
    systemd.install(plan)  # safe to repeat
    assert systemd.path.read_text() == unit(plan)
    assert stat.S_IMODE(systemd.path.stat().st_mode) == 0o600
    assert all(folder.is_dir() for folder in plan.written)
    assert [call[2:] for call in fakes.calls[: len(fakes.calls) // 2]] == [
        ["show", "--property=Version"],
        ["daemon-reload"],
        ["reset-failed", "localrun.service"],
        ["enable", "localrun.service"],
        ["restart", "localrun.service"],
    ]


def test_it_lies_where_the_users_configuration_does(fakes, tmp_path: Path):
    systemd = Systemd(home=tmp_path, environ={"XDG_CONFIG_HOME": "/elsewhere"})
    assert systemd.path == Path("/elsewhere/systemd/user/localrun.service")


def test_a_start_that_fails_names_the_logs(systemd, fakes, make_plan):
    fakes.answers({"systemctl --user restart": [{"status": 1, "stderr": "Job failed.\nSee status.\n"}]})
    with pytest.raises(ServiceFailed, match=r"Job failed\. See status\..*localrun service logs"):
        systemd.install(make_plan())


@pytest.mark.parametrize(
    ("shown", "state"),
    [
        ("LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=42\nResult=success\nNRestarts=0",
         (True, True, "active (running)", 42)),
        ("LoadState=loaded\nActiveState=failed\nSubState=failed\nMainPID=0\nResult=exit-code\nNRestarts=5",
         (True, False, "failed (failed), exit-code, restarted 5 times", None)),
        ("LoadState=not-found\nActiveState=inactive\nSubState=dead\nMainPID=0\nResult=success\nNRestarts=0",
         (False, False, "inactive (dead)", None)),
    ],
)  # fmt: skip
def test_what_systemd_knows(systemd, fakes, shown, state):
    fakes.answers({SHOW: [{"stdout": shown + "\n"}]})
    assert tuple(systemd.state()) == state


def test_logs_come_from_the_journal(systemd, fakes, capfd):
    fakes.answers({"journalctl": [{"stdout": "a line\n"}]})
    assert systemd.show_logs(n_lines=7, follow=True) == 0
    assert capfd.readouterr().out == "a line\n"
    assert fakes.calls == [
        ["journalctl", "--user", "--unit", "localrun.service", "--lines", "7", "--no-pager", "--follow"],
    ]


def test_uninstall_leaves_nothing(systemd, fakes, make_plan):
    assert not systemd.uninstall()
    systemd.install(make_plan())
    n_before = len(fakes.calls)
    assert systemd.uninstall()
    assert not systemd.path.exists()
    assert [call[2:] for call in fakes.calls[n_before:]] == [
        ["show", "--property=Version"],
        ["disable", "--now", "localrun.service"],
        ["daemon-reload"],
        ["reset-failed", "localrun.service"],
    ]


NO_BUS = {"systemctl --user show": [{"status": 1, "stderr": "Failed to connect to bus: No medium found\n"}]}


def test_without_a_session_it_says_how_to_get_one(systemd, fakes, make_plan):
    fakes.answers(NO_BUS)
    with pytest.raises(NotSupported, match=r"No medium found.*sudo loginctl enable-linger kim.*XDG_RUNTIME_DIR"):
        systemd.install(make_plan())
    assert not systemd.path.exists()


def test_in_a_container_it_says_what_to_run_instead(systemd, fakes, tmp_path: Path, make_plan):
    fakes.answers(NO_BUS)
    (tmp_path / "booted").rmdir()
    with pytest.raises(NotSupported, match=r"systemd does not run.*localrun serve"):
        systemd.install(make_plan())
    (fakes.folder / "systemctl").unlink()
    with pytest.raises(NotSupported, match=r"systemctl.*localrun serve"):
        systemd.state()


def test_in_wsl_it_says_how_to_switch_systemd_on(systemd, fakes, tmp_path: Path, make_plan):
    fakes.answers(NO_BUS)
    (tmp_path / "version").write_text("Linux version 5.15-microsoft-standard-WSL2")
    with pytest.raises(NotSupported, match=r"/etc/wsl\.conf.*wsl --shutdown"):
        systemd.install(make_plan())


def test_a_unit_that_was_left_can_be_removed_without_systemd(systemd, fakes):
    fakes.answers(NO_BUS)
    with pytest.raises(NotSupported):
        systemd.uninstall()
    systemd.path.parent.mkdir(parents=True)
    systemd.path.touch()
    assert systemd.uninstall()
    assert not systemd.path.exists()
