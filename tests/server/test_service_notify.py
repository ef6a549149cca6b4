"""What systemd hears from the daemon."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from localrun.server.service_notify import READY, STOPPING, ServiceNotify
from tests.daemon import running_daemon

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="systemd's protocol")


@pytest.fixture
def manager(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(30)
        yield listening


def test_the_daemon_says_when_it_is_ready_and_when_it_stops(manager):
    with running_daemon(NOTIFY_SOCKET=manager.getsockname()) as daemon:
        first = manager.recv(4096).decode()
        assert first == f"READY=1\nSTATUS=listening on {daemon.url}"
        assert daemon.http.get("/health").status_code == 200
        assert daemon.stop() == 0
        assert manager.recv(4096) == b"STOPPING=1"


def test_abstract_addresses_are_understood():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(30)
        try:
            listening.bind("")  # the kernel picks an abstract name
        except OSError:
            pytest.skip("this system has no abstract names")
        name = listening.getsockname()
        assert isinstance(name, bytes)
        ServiceNotify({"NOTIFY_SOCKET": "@" + name[1:].decode()}).send(STOPPING)
        assert listening.recv(4096) == b"STOPPING=1"


def test_engines_do_not_inherit_the_address(tmp_path: Path):
    environ = {"NOTIFY_SOCKET": str(tmp_path / "nobody"), "OTHER": "stays"}
    notify = ServiceNotify(environ)
    assert environ == {"OTHER": "stays"}
    notify.send(READY)  # nobody listens there


def test_without_a_manager_nothing_is_sent():
    ServiceNotify({}).send(READY)
