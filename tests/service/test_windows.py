"""schtasks, as far as the daemon's task asks it; and what the task runs, which works everywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path, PureWindowsPath
from xml.etree import ElementTree

import pytest

from localrun.errors import NotSupported, ServiceFailed
from localrun.service.windows import TaskScheduler, start_file, task

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
        ("Actions/Exec/Arguments", '-P -m localrun.service.windows "C:\\Users\\Zoë Z\\service.json"'),
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


with_programs = pytest.mark.skipif(sys.platform == "win32", reason="needs programs with a #! line")
QUERY = "schtasks /query"
ACCOUNT = {"USERDOMAIN": "DESK", "USERNAME": "kim"}


@pytest.fixture
def scheduler(fakes, folders) -> TaskScheduler:
    fakes.add("schtasks")
    return TaskScheduler(folders=folders, environ=ACCOUNT)


@with_programs
def test_install_writes_the_start_file_and_makes_the_task(scheduler, fakes, folders, make_plan):
    scheduler.install(make_plan())
    assert b'"--port"' in scheduler.path.read_bytes()
    xml_path = folders.state / "service.xml"
    assert [call[1:] for call in fakes.calls[1:]] == [
        ["/end", "/tn", "localrun"],
        ["/create", "/tn", "localrun", "/xml", str(xml_path), "/f"],
        ["/run", "/tn", "localrun"],
    ]
    assert not xml_path.exists()


@with_programs
def test_what_schtasks_refuses_is_said(scheduler, fakes, folders, make_plan):
    fakes.answers({"schtasks /create": [{"status": 1, "stderr": "ERROR: Access is denied.\n"}]})
    with pytest.raises(ServiceFailed, match=r"schtasks /create.*Access is denied"):
        scheduler.install(make_plan())
    assert not (folders.state / "service.xml").exists()


@with_programs
def test_what_the_scheduler_knows(scheduler, fakes):
    line = '"DESK","\\localrun","N/A","{}","Interactive only","28.11.2026 09:00:00","{}","DESK\\kim"\n'
    # In German; the number is that of a task that runs.
    running, ready = ({"stdout": line.format(*each)} for each in (("Wird ausgeführt", 267009), ("Bereit", 0)))
    fakes.answers({QUERY: [running, ready, {"status": 1}]})
    assert tuple(scheduler.state()) == (True, True, "Wird ausgeführt", None)
    assert tuple(scheduler.state()) == (True, False, "Bereit", None)
    assert tuple(scheduler.state()) == (False, False, "not installed", None)


@with_programs
def test_uninstall_leaves_nothing(scheduler, fakes, make_plan):
    scheduler.install(make_plan())
    assert scheduler.uninstall()
    assert not scheduler.path.exists()
    assert [call[1] for call in fakes.calls[-2:]] == ["/end", "/delete"]
    fakes.answers({QUERY: [{"status": 1}]})
    assert not scheduler.uninstall()


@with_programs
def test_what_is_missing_is_named(fakes, folders, make_plan):
    with pytest.raises(NotSupported, match="schtasks is not installed"):
        TaskScheduler(folders=folders, environ=ACCOUNT).state()
    fakes.add("schtasks")
    with pytest.raises(NotSupported, match="USERNAME is not set"):
        TaskScheduler(folders=folders, environ={}).install(make_plan())


# --- in the task ---


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_it_is_the_daemon_with_the_files_environment_and_log(tmp_path: Path):
    log = tmp_path / "state" / "service.log"
    start = tmp_path / "start.json"
    environment = {"LOCALRUN_HOME": str(tmp_path / "home"), "LOCALRUN_PORT": "0"}
    start.write_text(json.dumps({"arguments": ["serve"], "environment": environment, "log": str(log)}))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LOCALRUN_")}
    process = subprocess.Popen([sys.executable, "-P", "-m", "localrun.service.windows", str(start)], env=clean)
    try:
        deadline_s = time.monotonic() + 60
        while not (log.is_file() and "localrun is listening on" in log.read_text()):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert "stopping" in log.read_text()


def test_a_command_line_that_fails_leaves_its_reason_in_the_log(tmp_path: Path):
    log = tmp_path / "service.log"
    start = tmp_path / "start.json"
    start.write_text(
        json.dumps({"arguments": ["serve", "--host", "0.0.0.0", "--port", "0"], "environment": {}, "log": str(log)})
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "localrun.service.windows", str(start)], check=False, timeout=60
    )
    assert ended.returncode == 2
    assert "there is no API key" in log.read_text()
