"""`localrun ps`: what is loaded, with each engine's process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localrun.cli import exits
from localrun.tui.daemon import snapshots
from tests.cli.conftest import ENGINE
from tests.daemon import Daemon, running_daemon
from tests.support.synthesis.synthesize import synthesize


def test_columns(localrun, daemon):
    header, row = localrun("ps", port=daemon.port).stdout.splitlines()
    assert header.startswith("NAME  PID   STATE")
    assert row.split()[:3] == ["tiny", "4242", "ready"]
    assert row.endswith("never")


def test_it_says_where_the_layers_lie(localrun, daemon):
    expected = {
        (32, 0): "32 in RAM",
        (32, 25): "24 on GPU, 8 in RAM",  # llama.cpp counts the output as one more, and moves it first
        (32, 33): "32 on GPU",
        (32, 1): "output on GPU, 32 in RAM",
        (0, 0): "-",
    }
    engines = [ENGINE | {"layers": n_layers, "gpu_layers": n_on_gpu} for n_layers, n_on_gpu in expected]
    daemon.answers["/localrun/v1/snapshot"] = SNAPSHOT | {"engines": engines}
    _, *rows = localrun("ps", port=daemon.port).stdout.splitlines()
    assert [re.split(r"\s{2,}", row)[-2] for row in rows] == list(expected.values())


def test_nodes_have_a_column_where_there_are_any(localrun, daemon):
    header, _ = localrun("ps", port=daemon.port).stdout.splitlines()
    assert "NODE" not in header
    engines = [ENGINE | {"node": node, "replica": node, "slots_busy": busy} for node, busy in (("n1", 3), ("n2", 5))]
    requests = [REQUEST | {"node": "n2"}, REQUEST | {"id": "req_2", "state": "queued", "node": ""}]
    daemon.answers["/localrun/v1/snapshot"] = SNAPSHOT | {"engines": engines, "requests": requests}
    header, *rows = localrun("ps", port=daemon.port).stdout.splitlines()
    assert header.split()[-1] == "NODE"
    assert [row.split()[-1] for row in rows] == ["n1", "n2"]
    assert [f"{busy}/8" in row for busy, row in zip((3, 5), rows, strict=True)] == [True, True]
    _, header, *rows = localrun("top", "--once", port=daemon.port).stdout.splitlines()
    assert header.split()[-1] == "NODE"
    assert rows[0].split()[-1] == "n2"
    assert rows[1].endswith("3.00 s"), "it is on none yet"


def test_a_device_that_is_being_prepared_is_no_mystery(localrun, daemon):
    engines = [ENGINE | {"layers": 32, "gpu_layers": 33, "is_preparing": True, "slots_busy": 2}]
    daemon.answers["/localrun/v1/snapshot"] = SNAPSHOT | {"engines": engines}
    _, row = localrun("ps", port=daemon.port).stdout.splitlines()
    assert "preparing the device" in row
    assert f"2/{ENGINE['slots']}" in row


def test_it_says_what_the_model_was_loaded_with(localrun, daemon):
    engines = [ENGINE | {"load": load} for load in ({}, {"num_ctx": 65536, "kv_type": "q8_0"})]
    daemon.answers["/localrun/v1/snapshot"] = SNAPSHOT | {"engines": engines}
    header, plain, asked = localrun("ps", port=daemon.port).stdout.splitlines()
    start = header.index("LOADED WITH")
    assert plain[start:].startswith("- ")
    assert asked[start:].startswith("num_ctx=65536 kv_type=q8_0 ")


def test_json_has_the_pid(localrun, daemon):
    (row,) = json.loads(localrun("ps", "--json", port=daemon.port).stdout)
    assert row["pid"] == 4242


def test_the_environment_names_the_daemon_unless_the_command_line_does(localrun, daemon, environment):
    environment["LOCALRUN_HOST"] = "127.0.0.2"  # where nobody listens
    ended = localrun("ps", port=daemon.port)
    assert ended.returncode == exits.DAEMON_UNREACHABLE
    assert f"http://127.0.0.2:{daemon.port}" in ended.stderr
    assert localrun("ps", "--host", "127.0.0.1", port=daemon.port).returncode == exits.OK
    environment["LOCALRUN_HOST"] = "http://two words"
    assert "LOCALRUN_HOST: host is 'two words'" in localrun("ps", port=daemon.port).stderr


def test_ps_starts_no_daemon(localrun, daemon):
    port = daemon.port
    daemon.shutdown()
    daemon.server_close()
    ended = localrun("ps", port=port)
    assert ended.returncode == exits.DAEMON_UNREACHABLE
    assert ended.stderr.startswith("error: ")
    assert f"http://127.0.0.1:{port}" in ended.stderr
    assert "`localrun serve`" in ended.stderr


PATIENCE_S = 60.0
REQUEST = {
    "id": "req_1", "client": "zed", "api": "/api/chat", "model": "tiny", "lane": "default", "state": "decode",
    "prompt_tokens": 512, "cached_tokens": 480, "output_tokens": 40, "tokens_per_s": 42.0, "ttft_s": 0.31, "age_s": 3.0,
}  # fmt: skip
SNAPSHOT = {
    "time_s": 1.0, "uptime_s": 1.0, "version": "1", "engines": [], "requests": [REQUEST],
    "aggregate": {"decode_tokens_per_s": 42.0, "running": 1, "queued": 2}, "system": {"cpu_percent": 87.0},
}  # fmt: skip


def test_once_prints_the_numbers_of_the_snapshot(localrun, daemon):
    daemon.answers["/localrun/v1/snapshot"] = SNAPSHOT
    total, header, row = localrun("top", "--once", port=daemon.port).stdout.splitlines()
    assert total.split("  ") == ["decode 42.0 tok/s", "prefill 0.0 tok/s", "running 1", "queued 2", "CPU 87%"]
    assert header.split() == [
        "STATE", "CLIENT", "ROUTE", "MODEL", "PROMPT", "CACHED", "OUTPUT", "DRAFTS", "TOK/S", "TTFT", "AGE",
    ]  # fmt: skip
    assert row.split() == [
        "decode", "zed", "/api/chat", "tiny", "512", "480", "40", "-", "42.0", "0.310", "s", "3.00", "s",
    ]  # fmt: skip


def test_once_says_how_many_drafted_tokens_were_accepted(localrun, daemon):
    request = REQUEST | {"drafted_tokens": 8, "accepted_tokens": 6}
    aggregate = SNAPSHOT["aggregate"] | {"draft_hit_rate": 0.5}
    daemon.answers["/localrun/v1/snapshot"] = SNAPSHOT | {"requests": [request], "aggregate": aggregate}
    total, _, row = localrun("top", "--once", port=daemon.port).stdout.splitlines()
    assert "drafts 50%" in total.split("  ")
    assert row.split()[7] == "75%"


def test_once_says_the_longest_step_and_what_most_of_it_was(localrun, daemon):
    step = {"at_s": 1000.0, "cpu_s": 0.01, "n_prefill_rows": 0, "n_decode_rows": 8, "n_draft_rows": 0, "n_running": 8}
    short, long = (step | {"seconds": sum(parts.values()), "parts": parts} for parts in (
        {"decode": 0.03}, {"decode": 0.025, "move": 0.18},
    ))  # fmt: skip
    engines = [ENGINE | {"long_steps": [short]}, ENGINE | {"long_steps": [long]}]
    daemon.answers["/localrun/v1/snapshot"] = SNAPSHOT | {"engines": engines}
    total, *_ = localrun("top", "--once", port=daemon.port).stdout.splitlines()
    assert "longest step 205 ms (move)" in total.split("  ")


def test_once_says_the_average_of_what_has_ended(localrun, daemon):
    ended = REQUEST | {"state": "done", "tokens_per_s": None, "tokens_per_s_avg": 12.34}
    daemon.answers["/localrun/v1/snapshot"] = SNAPSHOT | {"requests": [ended]}
    assert "  12.3  " in localrun("top", "--once", port=daemon.port).stdout


def test_a_model_that_was_loaded_by_its_path_has_its_name_in_the_list(localrun, tmp_path):
    path = tmp_path / "a-file.gguf"
    synthesize("tiny", "Q8_0", path)
    with running_daemon() as running:
        running.post("/api/generate", model=str(path))
        assert str(path) in localrun("ps", port=running.port).stdout
        localrun("create", "short", "--from", str(path), port=running.port)
        shown = localrun("ps", port=running.port).stdout
        assert "\nshort:latest  " in shown
        assert str(path) not in shown


def test_once_json_is_the_snapshot_of_the_api(localrun, daemon):
    daemon.answers["/localrun/v1/snapshot"] = SNAPSHOT
    found = json.loads(localrun("top", "--once", "--json", port=daemon.port).stdout)
    assert {name: found["requests"][0][name] for name in REQUEST} == REQUEST
    assert found["aggregate"]["queued"] == 2


def test_top_starts_no_daemon(localrun, daemon):
    port = daemon.port
    daemon.leave()
    assert localrun("top", "--once", port=port).returncode == exits.DAEMON_UNREACHABLE


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json"], "--json needs --once"),
        (["--once", "--record", "x"], "give only one of"),
        ([], "needs a terminal"),
        (["--replay", "missing"], "does not exist"),
    ],
)
def test_what_makes_no_sense_is_refused(localrun, daemon, arguments, said):
    ended = localrun("top", *arguments, port=daemon.port)
    assert ended.returncode == 2
    assert said in ended.stderr


def test_a_recording_is_never_written_over(localrun, daemon, tmp_path):
    path = tmp_path / "kept.jsonl"
    path.write_text("mine")
    ended = localrun("top", "--record", str(path), port=daemon.port)
    assert ended.returncode == 2
    assert "File exists" in ended.stderr
    assert path.read_text() == "mine"


def test_record_writes_what_the_events_say_until_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    with running_daemon() as daemon:
        environment = os.environ | {"LOCALRUN_HOME": str(tmp_path), "LOCALRUN_PORT": str(daemon.port)}
        recording = subprocess.Popen(
            [sys.executable, "-m", "localrun", "top", "--record", str(path)],
            env=environment, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        daemon.post("/v1/completions", {"model": "tiny", "prompt": "go on", "max_tokens": 5})
        deadline_s = time.monotonic() + PATIENCE_S
        while not (path.exists() and b"req_" in path.read_bytes()):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        recording.send_signal(signal.SIGINT)
        assert recording.wait(timeout=PATIENCE_S) == 0
        assert recording.stderr is not None
        assert "press Ctrl-C to stop" in recording.stderr.read()
        recording.stderr.close()
    found = list(snapshots(path))
    assert found[-1].requests[-1].model == "tiny"
    assert path.stat().st_mode & 0o077 == 0


def test_unload(localrun, daemon):
    ended = localrun("stop", "tiny", port=daemon.port)
    assert ended.returncode == 0
    assert "tiny" in ended.stdout
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
    assert (ended.returncode, ended.stdout) == (0, "the daemon has stopped\n"), ended.stderr
    assert daemon.bodies == [("/localrun/v1/shutdown", {})]
    assert localrun("stop", "--daemon", port=daemon.port).returncode == exits.DAEMON_UNREACHABLE


def test_logs_of_the_daemon_that_runs_and_of_the_last_one(localrun, tmp_path):
    with running_daemon() as running:
        running.post("/v1/completions", model="tiny", prompt="Hello", max_tokens=1)
        running.post("/api/generate", model="tiny", keep_alive=0)
        shown = localrun("logs", "-n", "1", port=running.port)
    assert shown.returncode == 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d INFO \S+: unloading tiny\n", shown.stdout)
    ended = localrun("logs", port=running.port)
    assert (ended.returncode, "no daemon is running" in ended.stderr) == (exits.DAEMON_UNREACHABLE, True)
    log = tmp_path / "home" / "state" / f"daemon-{running.port}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("one\ntwo \x1b[31m\nthree\n")
    last = localrun("logs", "--lines", "2", port=running.port)
    assert (last.returncode, last.stdout) == (0, "two \u241b[31m\nthree\n")
    assert str(log) in last.stderr


def test_logs_go_on_until_they_are_interrupted(environment):
    with running_daemon() as running:
        running.post("/v1/completions", model="tiny", prompt="Hello", max_tokens=1)
        command = [sys.executable, "-m", "localrun", "--port", str(running.port), "logs", "-f", "-n", "1"]
        following = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert following.stdout is not None
        assert "loaded tiny" in following.stdout.readline()
        running.post("/api/generate", model="tiny", keep_alive=0)
        assert "unloading tiny" in following.stdout.readline()
        following.send_signal(signal.SIGINT)
        _, error = following.communicate(timeout=60)
    assert (following.returncode, error) == (0, "")
