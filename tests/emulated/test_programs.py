"""The program from end to end as macOS and Windows would run it, played on Linux (`hook/other_system.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.daemon import Daemon, running_daemon
from tests.tui.test_in_a_terminal import Terminal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="plays the others on Linux")
ROOT = Path(__file__).parents[2]
SYSTEMS = ("darwin", "win32")
FOLDERS = {"localrun": ROOT / "localrun", "localrun.models": ROOT / "models", "localrun.tui": ROOT / "tui"}
TEXT = "SAY[[日本 Ω → ✓ é]]"


class Played(NamedTuple):
    """A system, its daemon with fake engines, and the file of what a native run would have complained about."""

    system: str
    daemon: Daemon
    complaints: Path
    deaths: Path

    @property
    def environment(self) -> dict[str, str]:
        """Of programs beside the daemon."""
        own = {"LOCALRUN_HOME": str(self.daemon.home), "LOCALRUN_PORT": str(self.daemon.port)}
        return hooked(self.system, self.complaints) | own | {"HOME": str(self.daemon.home)}


def hooked(system: str, complaints: Path) -> dict[str, str]:
    environment = {
        "PYTHONPATH": str(Path(__file__).with_name("hook")),
        "PYTHON_EMULATED": system,
        "PYTHON_EMULATED_LOG": str(complaints),
        "PYTHONWARNDEFAULTENCODING": "1",
        "PATH": os.environ["PATH"],
    }
    # What a pipe or a file has there.
    return environment | ({"PYTHONIOENCODING": "cp1252"} if system == "win32" else {})


def complained(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@pytest.fixture(scope="module", params=SYSTEMS)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp(request.param)
    more = {"LOCALRUN_FAKE_DEATHS": str(folder / "deaths"), "LOCALRUN_FAKE_SCRIPTS": "1"}
    complaints = folder / "complaints"
    with running_daemon(**hooked(request.param, complaints), **more) as daemon:
        yield Played(request.param, daemon, complaints, folder / "deaths")
    assert daemon.process.returncode == 0, daemon.log
    assert complained(complaints) == []


_COMMANDS = """
import json, sys
from localrun.__main__ import main
for command in json.loads(sys.argv[1]):
    print("COMMAND", *command, flush=True)
    sys.argv = ["localrun", *command]
    try:
        main()
    except SystemExit as left:
        status = left.code
    print("STATUS", status or 0, flush=True)
"""


def run(played: Played, *commands: list[str], **more: str) -> dict[str, str]:
    """What each command said, in one process; all must end well."""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", _COMMANDS, json.dumps(commands)], env=played.environment | more,
        stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", timeout=240, check=False,
    )  # fmt: skip
    said = {}
    for part in ended.stdout.split("COMMAND ")[1:]:
        command, _, rest = part.partition("\n")
        text, _, status = rest.rpartition("STATUS ")
        assert status.strip() == "0", f"{command}: {text}{ended.stderr}"
        said[command] = text
    assert len(said) == len(commands), ended.stdout + ended.stderr
    return said


# An extra that is not installed here.
WITH_RAY = tuple(f"localrun.cluster.on_ray.{name}" for name in ("bridge", "router", "serve_app"))


def test_every_module_can_be_imported(tmp_path: Path, played: Played) -> None:
    names = []
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            names.append(".".join([package, *(part for part in parts if part != "__init__")]))
    names = [name for name in names if name not in WITH_RAY]
    program = "import importlib, sys\nfor name in sys.stdin.read().split():\n    importlib.import_module(name)"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program], input="\n".join(sorted(names)), env=played.environment,
        capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert len(names) > 300


def test_commands(played: Played) -> None:
    said = run(
        played, ["--version"], ["--help"], ["version"], ["list"], ["show", "tiny", "--fit"], ["run", "tiny", "Hello"],
        ["ps"], ["ps", "--json"], ["cache"], ["logs"], ["key", "list"], ["completion", "fish"], ["stop", "tiny"],
    )  # fmt: skip
    assert "tiny" in said["list"]
    assert "fits this machine" in said["show tiny --fit"]
    assert json.loads(said["ps --json"])[0]["model"] == "tiny"


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_is_piped_is_utf_8(played: Played, form: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "localrun", "run", "tiny", TEXT, *(["--json"] if form == "json" else [])],
        env=played.environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert "日本 Ω → ✓ é" in ended.stdout.decode("utf-8")


def test_chats(played: Played) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "SAY[[Hello there]]"}], "stream": False}
    with contextlib.suppress(FileNotFoundError):
        played.deaths.unlink()
    ollama = played.daemon.post("/api/chat", ask).json()
    assert ollama["message"]["content"] == "Hello there"
    # A clock in steps of 15.6 ms would say that tokens take no time.
    assert ollama["eval_duration"] > 1
    assert ollama["prompt_eval_duration"] > 1
    openai = played.daemon.post("/v1/chat/completions", ask).json()
    assert openai["choices"][0]["message"]["content"] == "Hello there"


def test_an_engine_that_crashes_is_replaced_and_named(played: Played) -> None:
    played.deaths.write_text("SIGSEGV before 3\n", encoding="utf-8")
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "SAY[[It goes on]]"}], "stream": False}
    assert played.daemon.post("/api/chat", ask).json()["message"]["content"] == "It goes on"
    how = "exited with status 0xC0000005 (SIGSEGV)" if played.system == "win32" else "was killed by SIGSEGV"
    assert how in played.daemon.log


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_the_terminal_interface(played: Played, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, [sys.executable, "-P", "-m", "localrun"], played.environment, (80, 24))
    with contextlib.closing(terminal):
        terminal.see("Enter asks")
        terminal.type("SAY[[seen by nobody yet]]")
        terminal.press("Enter")
        terminal.see("yet")
        terminal.press("C-q")
        terminal.see_it_end()


# launchd and the task scheduler as far as they are asked: what is installed runs, until it is ended.
_MANAGER = """#!{python} -E
import json, os, plistlib, shlex, signal, subprocess, sys, time
from pathlib import Path
from xml.etree import ElementTree

pid, task = (Path({folder!r}, name) for name in ("pid", "task"))
asked, *rest = sys.argv[1:]


def start(command, environment, log):
    with open(log, "ab") as output:
        child = subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    pid.write_text(str(child.pid))


if asked == "bootstrap":
    agent = plistlib.loads(Path(rest[1]).read_bytes())
    start(agent["ProgramArguments"], agent["EnvironmentVariables"], agent["StandardOutPath"])
elif asked == "/create":
    exec_ = ElementTree.parse(rest[rest.index("/xml") + 1]).getroot().find(".//{{*}}Exec")
    task.write_text(json.dumps([exec_.findtext("{{*}}Command"), *shlex.split(exec_.findtext("{{*}}Arguments"))]))
elif asked == "/run":
    start(json.loads(task.read_text()), {{}}, os.devnull)
elif asked in ("bootout", "/end") and pid.exists():
    os.kill(int(pid.read_text()), signal.SIGTERM)
    pid.unlink()
elif asked == "/delete":
    task.unlink()
elif asked == "print":
    if not pid.exists():
        sys.exit(113)
    print("\\tstate = running\\n\\tpid = " + pid.read_text())
elif asked == "/query":
    if not task.exists():
        sys.exit(1)
    # In French; the number says that it runs.
    print('"PC","\\\\localrun","N/A","En cours","x","x","267009"')
"""


def test_the_service(played: Played, tmp_path: Path, free_port: int) -> None:
    name = "launchctl" if played.system == "darwin" else "schtasks"
    program = tmp_path / name
    program.write_text(_MANAGER.format(python=sys.executable, folder=str(tmp_path)), encoding="utf-8")
    program.chmod(0o755)
    said = run(
        played, ["service", "install"], ["service", "status"], ["service", "status", "--json"], ["list"],
        ["service", "uninstall"],
        PATH=f"{tmp_path}:{os.environ['PATH']}", USERNAME="kim", USERDOMAIN="PC", LOCALRUN_HOME=str(tmp_path / "home"),
        LOCALRUN_PORT=str(free_port), HOME=str(tmp_path),
    )  # fmt: skip
    assert json.loads(said["service status --json"])["is_running"]
    assert ("launchd" if played.system == "darwin" else "task scheduler") in said["service status"]
    assert "tiny" in said["list"]
    assert not (tmp_path / "pid").exists()


@pytest.mark.parametrize("system", ["win32"])
def test_a_real_model_loads_where_functions_are_looked_for_in_one_library(system: str, tmp_path: Path) -> None:
    """Elsewhere a library's own libraries are looked through as well."""
    with running_daemon(fake=False, **hooked(system, tmp_path / "complaints")) as daemon:
        ask = {"model": "tiny", "prompt": "What is 3 + 4?", "stream": False, "options": {"temperature": 0}}
        answer = daemon.post("/api/generate", ask)
        assert "7" in answer.json()["response"], daemon.log
    assert complained(tmp_path / "complaints") == []


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
