"""The daemon as a process: how it begins, and every way it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from localrun.access.keys import KeyFile
from localrun.config import ConfigError, Settings
from localrun.errors import PortBusy
from localrun.server import app
from localrun.server.app import READY, STOPPING, ServiceNotify
from tests.daemon import Daemon, running_daemon
from tests.fakes import SERVE
from tests.says import says

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
SLOW = {"LOCALRUN_FAKE_STEP_MS": "20"}
# What a terminal sends that is closed, and what logrotate's users do.
HANGUP = [] if sys.platform == "win32" else [signal.SIGHUP]


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT, *HANGUP])
def test_a_signal_is_a_good_end(signal_number: int) -> None:
    with running_daemon() as daemon:
        assert daemon.http.get("/health").json()["status"] == "ok"
        assert daemon.stop(signal_number) == 0
        assert daemon.process.stdout is not None
        assert daemon.process.stdout.read() == "", "one line on stdout, no more"
        assert "Traceback" not in daemon.log


def test_running_requests_end_in_peace() -> None:
    with running_daemon(**SLOW) as daemon:
        body = CHAT | {"options": {"num_predict": 20}}
        with daemon.http.stream("POST", "/api/chat", json=body) as response:
            lines = response.iter_lines()
            assert not json.loads(next(lines))["done"]
            daemon.process.send_signal(signal.SIGTERM)
            rest = [json.loads(line) for line in lines]
        assert rest[-1]["done"]
        assert rest[-1]["eval_count"] == 20
        assert daemon.process.wait(timeout=60) == 0


def test_endless_requests_end_with_an_error_event() -> None:
    with running_daemon(**SLOW) as daemon:
        endless = {"model": "tiny", "prompt": "x", "stream": True, "ignore_eos": True}
        with daemon.http.stream("POST", "/v1/completions", json=endless) as response:
            lines = response.iter_lines()
            next(lines)
            assert daemon.post("/localrun/v1/shutdown", {}).status_code == 200
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        assert events[-1]["error"]["code"] == "unavailable"
        assert daemon.process.wait(timeout=60) == 0
        assert "Traceback" not in daemon.log


def test_watchers_do_not_hold_up_the_end() -> None:
    with running_daemon() as daemon, daemon.http.stream("GET", "/localrun/v1/events") as response:
        next(response.iter_lines())
        assert daemon.stop() == 0


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_second_signal_ends_it_at_once() -> None:
    with running_daemon(**SLOW) as daemon:
        endless = {"model": "tiny", "prompt": "x", "stream": True, "ignore_eos": True}
        with daemon.http.stream("POST", "/v1/completions", json=endless) as response:
            next(response.iter_lines())
            daemon.process.send_signal(signal.SIGTERM)
            while daemon.http.get("/health").status_code == 200:
                time.sleep(0.01)
            assert daemon.stop() == -signal.SIGTERM


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_signal_that_means_nothing_here_ends_nothing() -> None:
    with running_daemon() as daemon:
        daemon.process.send_signal(signal.SIGUSR1)
        daemon.process.send_signal(signal.SIGUSR2)
        assert daemon.http.get("/health").status_code == 200
        assert daemon.stop() == 0
        assert "SIGUSR1 means nothing here" in daemon.log


def test_it_ends_by_itself_when_idle() -> None:
    with running_daemon("--idle-exit", "0.2") as daemon:
        assert daemon.process.wait(timeout=60) == 0


def test_a_busy_port_is_a_sentence() -> None:
    with running_daemon() as daemon:
        command = [sys.executable, "-m", "localrun", "serve", "--port", str(daemon.port)]
        environment = os.environ | {"LOCALRUN_HOME": "/nonexistent"}
        second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert second.returncode == 3
        assert f"port {daemon.port}" in second.stderr
        assert "--port" in second.stderr
        assert "Traceback" not in second.stderr
        assert second.stdout == ""
        assert daemon.http.get("/health").status_code == 200


def test_serve_refuses_before_it_starts_anything(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        app.serve(Settings(host="0.0.0.0", port=0))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortBusy, match="--port"):
        app.serve(Settings(port=taken.getsockname()[1]))
    with pytest.raises(ConfigError, match="origins"):
        app.serve(Settings(port=0, origins="*", models_dir=str(tmp_path)))
    file = tmp_path / "file"
    file.touch()
    for settings, said in (
        (Settings(port=0, models_dir=str(file / "models")), f"models_dir (LOCALRUN_MODELS) is {file / 'models'}, and"),
        (Settings(port=0, models_dir=f"{tmp_path}/b\udce4d"), "is not UTF-8; name a folder that is"),
        (Settings(port=0, model_dirs=str(file)), f"{file} is a file; name a folder"),
        (Settings(port=0, tls_cert=str(file)), "tls_key is missing"),
        (Settings(port=0, tls_cert=str(file), tls_key=str(file)), f"tls_cert: {file} cannot be read as a certificate"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            app.serve(settings)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="IPv6")
def test_both_versions_of_ip_reach_a_daemon_at_all_addresses(tmp_path: Path) -> None:
    """127.0.0.2 comes by TLS, as other machines do."""
    KeyFile(tmp_path / "data").create("laptop")
    with running_daemon("--host", "::", LOCALRUN_HOME=str(tmp_path)) as daemon, httpx2.Client(verify=False) as trusting:
        for url in ("http://127.0.0.1", "http://[::1]", "https://127.0.0.2"):
            answer = trusting.get(f"{url}:{daemon.port}/health")
            assert (answer.status_code, answer.json()["status"]) == (200, "ok"), url
        refused = trusting.get(f"https://127.0.0.2:{daemon.port}/health", headers={"Host": "evil.example"})
        assert refused.status_code == 403
        assert trusting.get(f"https://127.0.0.2:{daemon.port}/v1/models").status_code == 401
    assert json.loads((tmp_path / "state" / "audit.jsonl").read_text())["from"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/api/nothing", lambda content: content["error"]),
        ("/v1/nothing", lambda content: content["error"]["message"]),
        ("/v1/chat", lambda content: content["error"]["message"]),
        ("/nothing", lambda content: content["error"]["message"]),
        ("/api/tags/none", lambda content: content["error"]),
    ],
)
def test_unknown_paths_are_404_in_the_family_s_shape(daemon: Daemon, path: str, error: object) -> None:
    answer = daemon.http.get(path)
    assert (answer.status_code, answer.headers["x-localrun-error"]) == (404, "not_found")
    assert callable(error)
    assert path in error(answer.json())


def test_a_wrong_method_is_405_and_names_the_right_one(daemon: Daemon) -> None:
    answer = daemon.http.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_a_client_that_offers_a_websocket_is_told_at_once_to_go_on_without(daemon: Daemon) -> None:
    offer = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    answer = daemon.http.get("/v1/responses", headers=offer | {"sec-websocket-key": "bG9jYWxydW4gdGVzdHM="})
    assert (answer.status_code, answer.headers["upgrade"]) == (426, "HTTP/1.1")
    assert says(answer.json()["error"]["message"], "WebSocket", "POST")
    with daemon.http.stream("POST", "/v1/responses", json={"model": "tiny", "input": "x", "stream": True}) as begun:
        assert begun.status_code == 200


@pytest.fixture(scope="module")
def daemon() -> object:
    with running_daemon() as running:
        yield running


with_systemd = pytest.mark.skipif(sys.platform == "win32", reason="systemd's protocol")


@pytest.fixture
def manager(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(30)
        yield listening


@with_systemd
def test_the_daemon_says_when_it_is_ready_and_when_it_stops(manager):
    with running_daemon(NOTIFY_SOCKET=manager.getsockname()) as daemon:
        first = manager.recv(4096).decode()
        assert first == f"READY=1\nSTATUS=listening on {daemon.url}"
        assert daemon.http.get("/health").status_code == 200
        assert daemon.stop() == 0
        assert manager.recv(4096) == b"STOPPING=1"


@with_systemd
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


@with_systemd
def test_engines_do_not_inherit_the_address(tmp_path: Path):
    environ = {"NOTIFY_SOCKET": str(tmp_path / "nobody"), "OTHER": "stays"}
    notify = ServiceNotify(environ)
    assert environ == {"OTHER": "stays"}
    notify.send(READY)  # nobody listens there


def test_without_a_manager_nothing_is_sent():
    ServiceNotify({}).send(READY)


def test_a_line_of_the_log_has_its_zone(tmp_path: Path) -> None:
    with running_daemon() as daemon:
        assert daemon.stop() == 0
        assert re.search(
            r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d INFO localrun\S*: stopping$", daemon.log, re.M
        )


@pytest.mark.skipif(sys.platform != "linux", reason="systemd's journal")
def test_the_journal_gets_priorities_and_no_times(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w+") as journal:
        status = os.fstat(journal.fileno())
        environment = {
            "JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}", "LOCALRUN_HOME": str(tmp_path),
        }  # fmt: skip
        daemon = subprocess.Popen(
            [*SERVE, "--port", "0"], env=os.environ | environment, text=True,
            stdout=subprocess.PIPE, stderr=journal,
        )  # fmt: skip
        assert daemon.stdout is not None
        assert daemon.stdout.readline().startswith("localrun is listening")
        daemon.terminate()
        assert daemon.wait(timeout=60) == 0
        daemon.stdout.close()
        journal.seek(0)
        lines = journal.read().splitlines()
    assert any(re.fullmatch(r"<6>INFO localrun\S*: stopping", line) for line in lines)
    assert all(re.match(r"<[2-7]>", line) for line in lines)
