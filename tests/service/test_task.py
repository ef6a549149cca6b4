"""The Windows task: XML that parses, with the values where the task scheduler's schema has them."""

from __future__ import annotations

import json
from pathlib import Path, PureWindowsPath
from xml.etree import ElementTree

import pytest

from localrun.service.task import start_file, task

SPACE = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
PYTHON = r"C:\Program Files\R&D\python.exe"


@pytest.fixture
def xml(make_plan) -> ElementTree.Element:
    plan = make_plan(command=(PYTHON, "-P", "-m", "localrun", "serve"))
    text = task(plan, user=r"DESK\Zoë <z>", start_path=PureWindowsPath(r"C:\Users\Zoë Z\service.json"))
    # As it is written for schtasks; the parser reads the byte order mark.
    return ElementTree.fromstring(text.encode("utf-16"))


def text_of(xml: ElementTree.Element, path: str) -> str | None:
    return xml.findtext("/".join(f"t:{part}" for part in path.split("/")), namespaces=SPACE)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("Triggers/LogonTrigger/UserId", "DESK\\Zoë <z>"),
        ("Principals/Principal/UserId", "DESK\\Zoë <z>"),
        ("Principals/Principal/LogonType", "InteractiveToken"),
        ("Principals/Principal/RunLevel", "LeastPrivilege"),
        ("Settings/ExecutionTimeLimit", "PT0S"),
        ("Settings/DisallowStartIfOnBatteries", "false"),
        ("Settings/RestartOnFailure/Count", "3"),
        ("Settings/MultipleInstancesPolicy", "IgnoreNew"),
        ("Actions/Exec/Command", r"C:\Program Files\R&D\pythonw.exe"),
        ("Actions/Exec/Arguments", '-P -m localrun.service.logged "C:\\Users\\Zoë Z\\service.json"'),
    ],
)
def test_the_values_of_the_task(xml, path, value):
    assert text_of(xml, path) == value


def test_settings_stand_in_the_order_of_the_schema(xml):
    """The schema has them in any order (xs:all), but the sections of a task in this one."""
    assert [child.tag.rpartition("}")[2] for child in xml] == [
        "RegistrationInfo", "Triggers", "Principals", "Settings", "Actions",
    ]  # fmt: skip


def test_the_start_file_has_the_daemons_arguments(make_plan):
    start = json.loads(start_file(make_plan(log=Path("/state/service.log"))))
    assert start == {
        "arguments": ["serve", "--port", "11500"],
        "environment": {"LOCALRUN_SLOTS": "4"},
        "log": "/state/service.log",
    }
