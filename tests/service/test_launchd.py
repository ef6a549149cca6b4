"""launchctl, as far as the daemon's agent asks it."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localrun.errors import NotSupported, ServiceFailed
from localrun.service.launchd import Launchd, agent

GOLDEN = {
    "Label": "localrun.daemon",
    "ProgramArguments": ["/opt/localrun/bin/python", "-P", "-m", "localrun", "serve", "--port", "11500"],
    "EnvironmentVariables": {"LOCALRUN_MODELS": "/a & b/<models>"},
    "RunAtLoad": True,
    "KeepAlive": {"Crashed": True},
    "ThrottleInterval": 10,
    "ExitTimeOut": 30,
    "ProcessType": "Interactive",
    "Umask": 0o77,
    "StandardOutPath": "/state/service.log",
    "StandardErrorPath": "/state/service.log",
}


def test_the_property_list(make_plan):
    content = agent(make_plan(environment={"LOCALRUN_MODELS": "/a & b/<models>"}, log=Path("/state/service.log")))
    assert content.startswith(b'<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE plist')
    assert plistlib.loads(content) == GOLDEN


@pytest.mark.skipif(shutil.which("plutil") is None, reason="needs plutil")
def test_plutil_finds_nothing_wrong_with_it(make_plan, tmp_path: Path):
    path = tmp_path / "agent.plist"
    path.write_bytes(agent(make_plan()))
    subprocess.run(["plutil", "-lint", str(path)], check=True)


with_programs = pytest.mark.skipif(sys.platform == "win32", reason="needs programs with a #! line")
DOMAIN = f"gui/{os.getuid() if hasattr(os, 'getuid') else 0}"
RUNNING = {"stdout": "localrun.daemon = {\n\tstate = running\n\tpid = 77\n\tlast exit code = 0\n}\n"}
NOT_LOADED = {"status": 113, "stderr": "Could not find service\n"}
PRINT = "launchctl print"


@pytest.fixture
def launchd(fakes, tmp_path: Path) -> Launchd:
    fakes.add("launchctl")
    return Launchd(home=tmp_path / "home", log=tmp_path / "state" / "service.log")


@with_programs
def test_install_writes_the_agent_and_loads_it(launchd, fakes, make_plan):
    fakes.answers({PRINT: [NOT_LOADED]})
    launchd.install(make_plan())
    assert plistlib.loads(launchd.path.read_bytes())["Label"] == "localrun.daemon"
    assert [call[1:] for call in fakes.calls if call[1] != "print"] == [
        ["enable", f"{DOMAIN}/localrun.daemon"],
        ["bootstrap", DOMAIN, str(launchd.path)],
    ]


@with_programs
def test_an_agent_that_runs_is_replaced_once_it_is_gone(launchd, fakes, make_plan):
    fakes.answers({PRINT: [RUNNING, RUNNING, RUNNING, NOT_LOADED]})
    launchd.install(make_plan())
    assert [call[1] for call in fakes.calls] == ["print", "print", "bootout", "print", "print", "enable", "bootstrap"]


@with_programs
def test_what_launchctl_refuses_is_said(launchd, fakes, make_plan):
    fakes.answers({PRINT: [NOT_LOADED], "launchctl bootstrap": [{"status": 5, "stderr": "Bootstrap failed: 5\n"}]})
    with pytest.raises(ServiceFailed, match=r"Bootstrap failed: 5"):
        launchd.install(make_plan())


@with_programs
def test_what_launchd_knows(launchd, fakes):
    crashed = {"stdout": "x = {\n\tstate = spawn scheduled\n\tlast exit code = 3: (null)\n}\n"}
    fakes.answers({PRINT: [RUNNING, crashed, NOT_LOADED]})
    assert tuple(launchd.state()) == (True, True, "running", 77)
    assert tuple(launchd.state()) == (True, False, "spawn scheduled, last exit code 3", None)
    assert tuple(launchd.state()) == (False, False, "not loaded", None)


@with_programs
def test_logs_are_the_end_of_the_file(launchd, tmp_path: Path, capsys):
    assert launchd.show_logs(n_lines=2, follow=False) == 1
    assert "there is no log yet" in capsys.readouterr().out
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "service.log").write_text("one\ntwo\nthree\n")
    assert launchd.show_logs(n_lines=2, follow=False) == 0
    assert capsys.readouterr().out == "two\nthree\n"


@with_programs
def test_uninstall_leaves_nothing(launchd, fakes, make_plan):
    fakes.answers({PRINT: [NOT_LOADED]})
    assert not launchd.uninstall()
    launchd.install(make_plan())
    fakes.answers({PRINT: [RUNNING, NOT_LOADED]})
    assert launchd.uninstall()
    assert not launchd.path.exists()
    assert fakes.calls[-2][1:] == ["bootout", f"{DOMAIN}/localrun.daemon"]


@with_programs
def test_without_launchctl_it_says_what_to_run_instead(fakes, tmp_path: Path, make_plan):
    launchd = Launchd(home=tmp_path, log=tmp_path / "log")
    for call in (launchd.state, lambda: launchd.install(make_plan())):
        with pytest.raises(NotSupported, match="localrun serve"):
            call()
