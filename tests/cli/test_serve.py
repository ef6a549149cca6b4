"""`serve` has a flag for every setting, and refuses wrong ones by name."""

from __future__ import annotations

import json
import os
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localrun import __version__, config
from localrun.cli import exits
from localrun.cli.root import run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> list[tuple[config.Settings, float | None]]:
    """What `serve` would have started."""
    calls: list[tuple[config.Settings, float | None]] = []
    app: Any = types.ModuleType("localrun.server.app")
    app.serve = lambda settings, idle_exit_s, elsewhere: calls.append((settings, idle_exit_s))
    monkeypatch.setitem(sys.modules, "localrun.server.app", app)
    return calls


def test_without_flags_the_defaults_hold(served):
    assert run(["serve"]) == exits.OK
    assert served == [(config.Settings(), None)]


@pytest.mark.parametrize("field", config.FIELDS)
def test_every_setting_has_a_flag_with_help(field, served, capsys):
    texts = {"latency": "40", **{name: choices[-1] for name, choices in config.CHOICES.items()}}
    default = getattr(config.Settings(), field)
    text = texts.get(field, "::1" if isinstance(default, str) else "2048" if field.endswith("bytes") else "64")
    assert run(["serve", "--" + field.replace("_", "-"), text]) == exits.OK
    ((settings, _),) = served
    assert getattr(settings, field) == type(default)(text)
    assert run(["serve", "--help"]) == exits.OK
    assert config.env_name(field) in capsys.readouterr().out


def test_flags_win_over_the_environment_and_before_the_command_they_count_too(served, monkeypatch):
    monkeypatch.setenv("LOCALRUN_SLOTS", "3")
    monkeypatch.setenv("LOCALRUN_PORT", "1111")
    assert run(["serve", "--slots", "5", "--idle-exit", "30"]) == exits.OK
    assert run(["--port", "2222", "serve"]) == exits.OK
    assert run(["--port", "2222", "serve", "--port", "3333"]) == exits.OK
    assert [(settings.slots, settings.port, idle) for settings, idle in served] == [
        (5, 1111, 30.0),
        (3, 2222, None),
        (3, 3333, None),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slots", "many"], "--slots"),
        (["--slots", "0"], "--slots"),
        (["--slots", "1000"], "--slots"),
        (["--latency", "soon"], "interactive, balanced, throughput"),
        (["--kv-type", "f64"], "q8_0"),
        (["--idle-exit", "0"], "--idle-exit"),
        (["--speed", "9"], "--speed"),
        (["--host-names", "studio, a b!/"], "--host-names: host_names has 'a b!/'; use names such as studio.local"),
    ],
)
def test_wrong_values_are_named_and_nothing_starts(arguments, words, served, capsys):
    assert run(["serve", *arguments]) == exits.USAGE
    assert words in capsys.readouterr().err
    assert served == []


def test_what_the_server_refuses_is_wrong_use_too(served, capsys, monkeypatch):
    def refuse(settings: config.Settings, idle_exit_s: float | None, elsewhere: None) -> None:
        raise config.ConfigError("host is '0.0.0.0', which other machines can reach")

    monkeypatch.setattr(sys.modules["localrun.server.app"], "serve", refuse)
    assert run(["serve", "--host", "0.0.0.0"]) == exits.USAGE
    assert capsys.readouterr().err.startswith("error: host is '0.0.0.0'")


with_systemd = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="systemd is Linux's")

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


@with_systemd
def test_the_whole_life_of_a_service(program, systemd, tmp_path: Path, free_port):
    def service(*arguments: str):
        return program("service", *arguments, port=free_port)

    unit = tmp_path / "config/systemd/user/localrun.service"
    absent = service("status", "--json")
    assert absent.returncode == exits.ERROR

    installed = service("install")
    assert installed.returncode == exits.OK, installed.stderr
    assert f"installed {unit}" in installed.stdout
    assert f"http://127.0.0.1:{free_port}" in installed.stdout
    assert __version__ in installed.stdout
    assert "HF_TOKEN" in installed.stderr
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
    assert program("ps", port=free_port).returncode == exits.DAEMON_UNREACHABLE
    assert service("uninstall").stdout == "the service is not installed\n"


@with_systemd
def test_a_daemon_that_is_there_already_is_not_fought_over(program, systemd, daemon, tmp_path: Path):
    refused = program("service", "install", port=daemon.port)
    assert refused.returncode == exits.ERROR
    assert "localrun stop --daemon" in refused.stderr
    assert not (tmp_path / "config/systemd/user/localrun.service").exists()


@with_systemd
def test_where_nothing_manages_services_it_says_what_to_do(program, environment, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    environment["PATH"] = str(tmp_path / "empty")
    for arguments in (("install",), ("status",), ("uninstall",)):
        failed = program("service", *arguments)
        assert failed.returncode == exits.ERROR
        assert "localrun serve" in failed.stderr
