"""`localrun stop`: unloads a model, or ends the daemon and waits until it is gone."""

from __future__ import annotations

import subprocess
import sys

from localrun.cli import exits
from tests.daemon import Daemon, running_daemon


def test_unload(localrun, daemon):
    ended = localrun("stop", "tiny", port=daemon.port)
    assert (ended.returncode, ended.stdout) == (0, "tiny unloads when its requests have ended\n")
    assert daemon.bodies[-1] == ("/api/generate", {"model": "tiny", "stream": False, "keep_alive": 0})


def test_what_stop_says_is_true():
    with running_daemon() as daemon:
        assert _stop(daemon) == "tiny was not loaded\n"
        daemon.post("/v1/completions", model="tiny", prompt="Hello", max_tokens=2)
        assert _stop(daemon) == "unloaded tiny\n"
        assert daemon.http.get("/api/ps").json()["models"] == []


def _stop(daemon: Daemon) -> str:
    command = [sys.executable, "-m", "localrun", "stop", "tiny", "--port", str(daemon.port)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_unload_what_does_not_exist(localrun, daemon):
    assert localrun("stop", "missing", port=daemon.port).returncode == exits.MODEL_NOT_FOUND


def test_end_the_daemon(localrun, daemon):
    ended = localrun("stop", "--daemon", port=daemon.port)
    assert (ended.returncode, ended.stdout) == (0, "the daemon has ended\n"), ended.stderr
    assert daemon.bodies == [("/localrun/v1/shutdown", {})]
    assert localrun("stop", "--daemon", port=daemon.port).returncode == exits.DAEMON_UNREACHABLE
