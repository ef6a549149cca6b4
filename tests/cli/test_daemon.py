"""Finding a daemon, telling it from others, and starting one that fails."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun import __version__, config, errors
from localrun.cli import exits
from localrun.cli.arguments import parted
from localrun.cli.daemon import daemon_version, ensure_daemon, for_daemon, require_daemon, wait_until_gone
from tests.says import says


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port whose owner closes every connection without a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def hang_up() -> None:
            while not ended.is_set():
                server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        port = server.getsockname()[1]
        yield port
        ended.set()
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()


def test_a_daemon_is_found_by_its_version(daemon):
    settings = config.Settings(port=daemon.port)
    assert daemon_version(settings) == "9.8.7"
    assert ensure_daemon(settings) == require_daemon(settings) == f"http://127.0.0.1:{daemon.port}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_log_on_a_full_disk_ends_no_daemon(environment: dict[str, str]):
    """Nor does it change how it ends."""
    settings = config.Settings(port=_free_port())
    command = [sys.executable, "-m", "localrun", "serve", "--port", str(settings.port), "--idle-exit", "5"]
    with open("/dev/full", "ab") as log, subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process:
        while daemon_version(settings) is None:
            assert process.poll() is None
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize(("system", "is_mac"), [("darwin", True), ("linux", False)])
def test_another_machine_that_no_way_leads_to(monkeypatch: pytest.MonkeyPatch, system: str, is_mac: bool):
    """As macOS says it of a network that this program may not use."""

    def connect(*_: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr("localrun.access.discovery.connect", connect)
    monkeypatch.setattr("localrun.cli.daemon.sys.platform", system)
    settings = config.Settings(host="192.168.77.7", port=11434)
    with pytest.raises(errors.DaemonUnreachable, match="cannot be reached") as raised:
        daemon_version(settings)
    assert ("Local Network" in raised.value.message) == is_mac


def test_nobody():
    settings = config.Settings(port=_free_port())
    assert daemon_version(settings) is None
    with pytest.raises(errors.DaemonUnreachable, match="localrun serve"):
        require_daemon(settings)


@pytest.mark.parametrize("health", [(404, {"error": "not found"}, {}), (200, {"status": "ok"}, {})])
def test_another_program_is_not_taken_for_a_daemon(daemon, health):
    daemon.health = health
    for find in (daemon_version, ensure_daemon, require_daemon):
        with pytest.raises(errors.PortBusy, match=f"port {daemon.port} .* --port or LOCALRUN_PORT"):
            find(config.Settings(port=daemon.port))


def test_ollama_is_named(daemon, monkeypatch):
    daemon.health = (404, {"error": "404 page not found"}, {})
    daemon.root = b"Ollama is running"
    with pytest.raises(errors.PortBusy, match="Ollama"):
        daemon_version(config.Settings(port=daemon.port))


def test_a_port_that_says_nothing_of_sense(silent_port):
    with pytest.raises(errors.PortBusy, match=str(silent_port)):
        daemon_version(config.Settings(port=silent_port))


def test_a_daemon_that_is_shutting_down_is_neither_used_nor_taken_for_another(daemon):
    stopping = (503, {"error": {"message": "localrun is shutting down"}}, {"X-Localrun-Error": "unavailable"})
    daemon.health = stopping
    settings = config.Settings(port=daemon.port)
    with pytest.raises(errors.Unavailable):
        daemon_version(settings)
    with pytest.raises(errors.Unavailable, match=rf":{daemon.port} .* 0\.2 s"):
        wait_until_gone(settings, timeout_s=0.2)


def test_waiting_ends_when_the_daemon_is_gone():
    wait_until_gone(config.Settings(port=_free_port()), timeout_s=60)


def test_port_0_names_no_daemon():
    import click

    with pytest.raises(click.UsageError, match="port 0"):
        ensure_daemon(config.Settings(port=0))


@pytest.mark.skipif(sys.platform == "win32", reason="uses a shell script")
def test_a_daemon_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path, monkeypatch, environment):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nfor n in 1 2 3 4 5 6 7; do echo line $n; done\nexit 9\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    settings = config.Settings(port=_free_port())
    for _ in range(2):  # the second time there is an older log to put aside
        with pytest.raises(errors.DaemonUnreachable, match="status 9") as raised:
            ensure_daemon(settings)
        log = config.folders().state / f"daemon-{settings.port}.log"
        assert raised.value.message.endswith(f"{log}:\n  line 3\n  line 4\n  line 5\n  line 6\n  line 7")
    assert log.with_suffix(".log.1").exists()


def test_a_host_name_that_the_daemon_refuses_is_said_at_once(daemon):
    refused = {"error": {"message": "the Host header is not this machine's loopback name"}}
    daemon.health = (403, refused, {"X-Localrun-Error": "forbidden"})
    with pytest.raises(errors.Forbidden, match="use --host"):
        ensure_daemon(config.Settings(port=daemon.port))


@pytest.fixture
def port(program) -> Iterator[int]:
    """A free port; a daemon that was started on it is ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = int(probe.getsockname()[1])
    yield number
    program("stop", "--daemon", port=number)


def test_commands_that_come_at_once_share_one_daemon(program, environment, port, tmp_path: Path):
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
    assert f"localrun is listening on http://127.0.0.1:{port}" in (state / f"daemon-{port}.log").read_text()
    assert not (state / f"daemon-{port}.log.1").exists(), "one command alone started a daemon"
    assert json.loads(program("version", "--json", port=port).stdout) == {
        "localrun": __version__,
        "daemon": __version__,
    }
    assert json.loads(program("ps", "--json", port=port).stdout) == []

    second = program("serve", port=port)
    assert second.returncode == exits.PORT_BUSY
    assert f"error: localrun {__version__} runs at port {port} already, and every command uses it" in second.stderr
    assert "localrun stop --daemon" in second.stderr
    assert "--port" in second.stderr

    assert program("stop", "--daemon", port=port).returncode == exits.OK
    assert program("ps", port=port).returncode == exits.DAEMON_UNREACHABLE


def next_steps(environment: dict[str, str], port: int) -> str:
    """The last words of `make run`."""
    command = [sys.executable, str(Path(__file__).parents[2] / "packaging" / "next_steps.py"), "localrun"]
    return subprocess.check_output(command, text=True, env=environment | {"LOCALRUN_PORT": str(port)})


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no permission bits")
def test_a_daemon_that_a_command_starts_is_named_and_so_is_another_one_with_the_same_data(program, port, environment):
    life = "(stops after 30 min without requests)"
    assert program("list", port=port).stderr == f"started the daemon at http://127.0.0.1:{port} {life}\n"
    assert program("list", port=port).stderr == ""
    other = _free_port()
    said = program("list", port=other).stderr
    assert said.endswith(f"at http://127.0.0.1:{other} {life}; another one with the same data runs at port {port}\n")
    closing = next_steps(environment, other)
    assert says(closing, "daemon runs", other, "Next:", "browser", f"http://127.0.0.1:{other}/", "stop --daemon")
    program("stop", "--daemon", port=other)
    assert "daemon" not in next_steps(environment, other)


def test_the_log_is_for_the_user_alone(program, port, environment):
    assert program("list", port=port).returncode == exits.OK
    log = Path(environment["LOCALRUN_HOME"]) / "state" / f"daemon-{port}.log"
    assert f"http://127.0.0.1:{port}" in log.read_text()
    assert os.stat(log).st_mode & 0o077 == 0


@pytest.mark.skipif(sys.platform == "win32", reason="uses a shell script")
def test_a_daemon_at_another_address_leaves_the_log_of_the_first(tmp_path: Path, monkeypatch, environment):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho mine\nexit 9\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    state = config.folders().state
    state.mkdir(parents=True)
    (state / "daemon.log").write_text("of the first, which runs")
    ports = [_free_port(), _free_port()]
    for port in ports:
        with pytest.raises(errors.DaemonUnreachable):
            ensure_daemon(config.Settings(port=port))
    with pytest.raises(errors.DaemonUnreachable):
        ensure_daemon(config.Settings(port=ports[0], host="::1"))
    assert (state / "daemon.log").read_text() == "of the first, which runs"
    logs = {path.name for path in state.glob("*.log*")}
    assert logs == {"daemon.log", *(f"daemon-{port}.log" for port in ports), f"daemon-__1-{ports[0]}.log"}


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "localrun/tiny", "org/name:Q4_K_M", ""])
def test_names_stay(name):
    assert for_daemon(name) == name


@pytest.mark.parametrize("name", ["x.gguf", "./x.gguf", "sub/x.gguf", "./x", "sub/plain"])
def test_files_become_absolute(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "plain").touch()
    assert for_daemon(name) == str(tmp_path / name)


def test_home_and_absolute_paths():
    assert for_daemon("~/m/x.gguf") == str(Path.home() / "m" / "x.gguf")
    assert for_daemon("/m/x.gguf") == "/m/x.gguf"


def test_a_file_of_a_repository_on_the_hub_is_no_path():
    for name in (
        "owner/repo:model-Q4_0.gguf",
        "hf.co/owner/repo@v1:m.gguf",
        "owner/repo:My Model (v2) Q4_K_M.gguf",
        "https://huggingface.co/owner/repo:m.gguf",
    ):
        assert for_daemon(name) == name
    for path in ("./owner/repo:m.gguf", "../repo:m.gguf", "repo:m.gguf", "/owner/repo:m.gguf"):
        assert for_daemon(path) == str(Path(path).absolute())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("studio.local", ("studio.local", None)), ("Studio.local.", ("Studio.local", None)),
        ("studio.local:8443", ("studio.local", 8443)), ("https://studio.local:8443/v1", ("studio.local", 8443)),
        ("http://studio.local", ("studio.local", None)), ("10.0.0.7:80", ("10.0.0.7", 80)), ("::1", ("::1", None)),
        ("[::1]", ("::1", None)), ("[fd00::7]:8443", ("fd00::7", 8443)), ("https://[fd00::7]", ("fd00::7", None)),
    ],
)  # fmt: skip
def test_a_host_may_be_written_with_its_port_or_as_a_url(text: str, expected: tuple[str, int | None]) -> None:
    assert parted(text, "--host") == expected


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("ftp://studio", "ftp:// reaches no daemon"),
        ("studio:0", "--host: '0' is not a port; use a number from 1 to 65535"),
        ("studio:x", "--host: 'x' is not a port; use a number from 1 to 65535"),
    ],
)
def test_a_host_that_is_none(localrun, host: str, problem: str) -> None:
    done = localrun("--host", host, "list")
    assert (done.returncode, problem in done.stderr) == (exits.USAGE, True)


def test_a_port_that_is_said_twice_is_said_once(localrun) -> None:
    done = localrun("--host", "studio.local:8443", "--port", "9000", "list")
    assert done.returncode == exits.USAGE
    assert "leave one of them out" in done.stderr
