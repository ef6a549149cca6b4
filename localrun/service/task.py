"""The Windows task of a plan: at logon, as the user, without a window. Pure.

The task scheduler knows neither environments nor logs, so a task starts `logged.py`, which reads both from a small JSON
file: `start_file`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec

from localrun.service.plan import ServicePlan

NAME = "localrun"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What `logged.py` reads. `arguments` are those after the program's name."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    log: str


def start_file(plan: ServicePlan) -> bytes:
    """The JSON of a plan for `logged.py`."""
    arguments = plan.command[plan.command.index("localrun") + 1 :]
    start = Start(arguments=tuple(arguments), environment=plan.environment, log=str(plan.log))
    return msgspec.json.format(msgspec.json.encode(start, order="sorted"), indent=2) + b"\n"


def task(plan: ServicePlan, *, user: str, start_path: Path) -> str:
    """The XML that `schtasks /create /xml` reads; `user` is DOMAIN\\name, `start_path` where `start_file` lies."""
    program = plan.command[0]
    # The same interpreter without a console window.
    if program.lower().endswith("python.exe"):
        program = program[: -len("python.exe")] + "pythonw.exe"
    arguments = ["-P", "-m", "localrun.service.logged", str(start_path)]
    return _TASK.format(user=escape(user), program=escape(program), arguments=escape(_command_line(arguments)))


def _command_line(arguments: Sequence[str]) -> str:
    return subprocess.list2cmdline(arguments)


# Priority 5 is a normal program's; the scheduler's own default is below that. No time limit, also on batteries.
_TASK = """\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo>
    <Description>localrun, language models on this machine</Description>
  </RegistrationInfo>
  <Triggers>
    <LogonTrigger>
      <Enabled>true</Enabled>
      <UserId>{user}</UserId>
    </LogonTrigger>
  </Triggers>
  <Principals>
    <Principal id="Author">
      <UserId>{user}</UserId>
      <LogonType>InteractiveToken</LogonType>
      <RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <StartWhenAvailable>true</StartWhenAvailable>
    <Hidden>true</Hidden>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <Priority>5</Priority>
    <RestartOnFailure>
      <Interval>PT1M</Interval>
      <Count>3</Count>
    </RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>{program}</Command>
      <Arguments>{arguments}</Arguments>
    </Exec>
  </Actions>
</Task>
"""
