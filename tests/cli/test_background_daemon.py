"""The real daemon, started in the background by whichever command comes first."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun import __version__
from localrun.cli import exits


@pytest.fixture
def port(localrun) -> Iterator[int]:
    """A free port; a daemon that was started on it is ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = int(probe.getsockname()[1])
    yield number
    localrun("stop", "--daemon", port=number)


def test_commands_that_come_at_once_share_one_daemon(localrun, environment, port, tmp_path: Path):
    commands = [
        subprocess.Popen(
            [sys.executable, "-m", "localrun", "list", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=tmp_path, env=environment | {"LOCALRUN_PORT": str(port)},
        )
        for _ in range(3)
    ]  # fmt: skip
    for command in commands:
        printed, complaints = command.communicate(timeout=120)
        assert command.returncode == exits.OK, complaints
        assert isinstance(json.loads(printed), list)
    state = Path(environment["LOCALRUN_HOME"]) / "state"
    assert f"localrun is listening on http://127.0.0.1:{port}" in (state / "daemon.log").read_text()
    assert not (state / "daemon.log.1").exists(), "one command alone started a daemon"
    assert json.loads(localrun("version", "--json", port=port).stdout) == {
        "localrun": __version__,
        "daemon": __version__,
    }
    assert json.loads(localrun("ps", "--json", port=port).stdout) == []

    second = localrun("serve", port=port)
    assert second.returncode == exits.PORT_BUSY
    assert str(port) in second.stderr
    assert "--port" in second.stderr

    assert localrun("stop", "--daemon", port=port).returncode == exits.OK
    assert localrun("ps", port=port).returncode == exits.DAEMON_UNREACHABLE


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no permission bits")
def test_the_log_is_for_the_user_alone(localrun, port, environment):
    assert localrun("list", port=port).returncode == exits.OK
    log = Path(environment["LOCALRUN_HOME"]) / "state" / "daemon.log"
    assert f"http://127.0.0.1:{port}" in log.read_text()
    assert os.stat(log).st_mode & 0o077 == 0
