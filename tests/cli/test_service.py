"""`localrun service` against a systemctl on PATH that reads the unit and really starts what it says."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun import __version__
from localrun.cli import exits

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="systemd is Linux's")

# Starts the unit's command with the unit's variables, and nothing of this shell's but PATH.
_SYSTEMCTL = """#!{python}
import os, shlex, signal, subprocess, sys, time
from pathlib import Path
folder = Path({folder!r})
unit = folder / "config/systemd/user/localrun.service"
pid_path = folder / "pid"

def pid():
    return int(pid_path.read_text()) if pid_path.exists() else 0

def stop():
    if pid():
        os.kill(pid(), signal.SIGTERM)
        # A child of nobody here may stay a zombie.
        stat = Path(f"/proc/{{pid()}}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.05)
        pid_path.unlink()

def words(key):
    lines = [line for line in unit.read_text().splitlines() if line.startswith(key + "=")]
    return [word.replace("%%", "%") for line in lines for word in shlex.split(line.partition("=")[2])]

verb = sys.argv[2]
if verb == "restart":
    stop()
    environ = {{"PATH": os.environ["PATH"]}} | dict(word.split("=", 1) for word in words("Environment"))
    command = words("ExecStart")
    with (folder / "journal").open("ab") as log:
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                   start_new_session=True)
    pid_path.write_text(str(process.pid))
elif verb == "disable":
    stop()
elif verb == "show" and "localrun.service" in sys.argv:
    active = "active" if pid() else "inactive"
    print(f"LoadState=loaded\\nActiveState={{active}}\\nSubState=running\\nMainPID={{pid()}}\\nNRestarts=0")
"""
_JOURNALCTL = """#!{python}
from pathlib import Path
print(Path({folder!r}, "journal").read_text(), end="")
"""


@pytest.fixture
def systemd(tmp_path: Path, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of a shell that finds the two programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("systemctl", _SYSTEMCTL), ("journalctl", _JOURNALCTL)):
        (folder / name).write_text(text.format(python=sys.executable, folder=str(tmp_path)))
        (folder / name).chmod(0o755)
    (tmp_path / "journal").touch()
    environment |= {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HF_HOME": str(tmp_path / "huggingface"),
        "LOCALRUN_KV_CELLS": "2048",
        "HF_TOKEN": "secret",
    }
    environment.pop("HF_HUB_CACHE", None)
    yield environment
    pid = tmp_path / "pid"
    if pid.exists():
        os.kill(int(pid.read_text()), 9)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_the_whole_life_of_a_service(localrun, systemd, tmp_path: Path, free_port):
    def service(*arguments: str):
        return localrun("service", *arguments, port=free_port)

    unit = tmp_path / "config/systemd/user/localrun.service"
    absent = service("status", "--json")
    assert absent.returncode == exits.ERROR

    installed = service("install")
    assert installed.returncode == exits.OK, installed.stderr
    assert f"installed {unit}" in installed.stdout
    assert f"localrun {__version__} is listening on http://127.0.0.1:{free_port}" in installed.stdout
    assert "HF_TOKEN is not taken over" in installed.stderr
    assert "secret" not in unit.read_text()

    shown = json.loads(service("status", "--json").stdout)
    assert shown["is_running"]
    assert shown["pid"] == int((tmp_path / "pid").read_text())
    assert shown["daemon"] == __version__
    # The variables of the shell went with it: the daemon has its files where this test has them.
    environ = Path(f"/proc/{shown['pid']}/environ").read_bytes().split(b"\0")
    assert b"LOCALRUN_KV_CELLS=2048" in environ
    assert (Path(systemd["LOCALRUN_HOME"]) / "data").is_dir()
    assert f"listening on http://127.0.0.1:{free_port}" in service("logs").stdout

    again = service("install")
    assert again.returncode == exits.OK, again.stderr
    assert json.loads(service("status", "--json").stdout)["pid"] != shown["pid"]

    assert service("uninstall").stdout == f"removed {unit}\n"
    assert not unit.exists()
    assert not (tmp_path / "pid").exists()
    assert localrun("ps", port=free_port).returncode == exits.DAEMON_UNREACHABLE
    assert service("uninstall").stdout == "the service is not installed\n"


def test_a_daemon_that_is_there_already_is_not_fought_over(localrun, systemd, daemon, tmp_path: Path):
    refused = localrun("service", "install", port=daemon.port)
    assert refused.returncode == exits.ERROR
    assert "localrun stop --daemon" in refused.stderr
    assert not (tmp_path / "config/systemd/user/localrun.service").exists()


def test_where_nothing_manages_services_it_says_what_to_do(localrun, environment, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    environment["PATH"] = str(tmp_path / "empty")
    for arguments in (("install",), ("status",), ("uninstall",)):
        failed = localrun("service", *arguments)
        assert failed.returncode == exits.ERROR
        assert "localrun serve" in failed.stderr
