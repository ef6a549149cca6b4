"""The launchd agent, as plistlib and, where it exists, plutil read it."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from localrun.service.agent import agent

GOLDEN = {
    "Label": "localrun.daemon",
    "ProgramArguments": ["/opt/localrun/bin/python", "-P", "-m", "localrun", "serve", "--port", "11500"],
    "EnvironmentVariables": {"LOCALRUN_MODELS": "/a & b/<models>"},
    "RunAtLoad": True,
    "KeepAlive": {"SuccessfulExit": False},
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
