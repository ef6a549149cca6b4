"""schtasks, as far as the daemon's task asks it."""

from __future__ import annotations

import sys

import pytest

from localrun.errors import NotSupported, ServiceFailed
from localrun.service.windows import TaskScheduler

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs programs with a #! line")
QUERY = "schtasks /query"
ACCOUNT = {"USERDOMAIN": "DESK", "USERNAME": "kim"}


@pytest.fixture
def scheduler(fakes, folders) -> TaskScheduler:
    fakes.add("schtasks")
    return TaskScheduler(folders=folders, environ=ACCOUNT)


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


def test_what_schtasks_refuses_is_said(scheduler, fakes, folders, make_plan):
    fakes.answers({"schtasks /create": [{"status": 1, "stderr": "ERROR: Access is denied.\n"}]})
    with pytest.raises(ServiceFailed, match="schtasks /create failed: ERROR: Access is denied"):
        scheduler.install(make_plan())
    assert not (folders.state / "service.xml").exists()


def test_what_the_scheduler_knows(scheduler, fakes):
    running = {"stdout": '"\\localrun","N/A","Running"\n'}
    ready = {"stdout": '"\\localrun","N/A","Ready"\n'}
    fakes.answers({QUERY: [running, ready, {"status": 1}]})
    assert tuple(scheduler.state()) == (True, True, "Running", None)
    assert tuple(scheduler.state()) == (True, False, "Ready", None)
    assert tuple(scheduler.state()) == (False, False, "not installed", None)


def test_uninstall_leaves_nothing(scheduler, fakes, make_plan):
    scheduler.install(make_plan())
    assert scheduler.uninstall()
    assert not scheduler.path.exists()
    assert [call[1] for call in fakes.calls[-2:]] == ["/end", "/delete"]
    fakes.answers({QUERY: [{"status": 1}]})
    assert not scheduler.uninstall()


def test_what_is_missing_is_named(fakes, folders, make_plan):
    with pytest.raises(NotSupported, match="schtasks is not installed"):
        TaskScheduler(folders=folders, environ=ACCOUNT).state()
    fakes.add("schtasks")
    with pytest.raises(NotSupported, match="USERNAME is not set"):
        TaskScheduler(folders=folders, environ={}).install(make_plan())
