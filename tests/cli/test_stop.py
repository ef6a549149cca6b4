"""`localrun stop`: unloads a model, or ends the daemon and waits until it is gone."""

from __future__ import annotations

from localrun.cli import exits


def test_unload(localrun, daemon):
    ended = localrun("stop", "tiny", port=daemon.port)
    assert (ended.returncode, ended.stdout) == (0, "unloaded tiny\n")
    assert daemon.bodies == [("/api/generate", {"model": "tiny", "stream": False, "keep_alive": 0})]


def test_unload_what_does_not_exist(localrun, daemon):
    assert localrun("stop", "missing", port=daemon.port).returncode == exits.MODEL_NOT_FOUND


def test_end_the_daemon(localrun, daemon):
    ended = localrun("stop", "--daemon", port=daemon.port)
    assert (ended.returncode, ended.stdout) == (0, "the daemon has ended\n"), ended.stderr
    assert daemon.bodies == [("/localrun/v1/shutdown", {})]
    assert localrun("stop", "--daemon", port=daemon.port).returncode == exits.DAEMON_UNREACHABLE
