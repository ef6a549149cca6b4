"""Faults 40 to 42: engines that are killed, decodes and saved state that fail, and processes that stop, end or lose
their clock.

What llama.cpp answers is changed inside the engine (`injection.py`); all else is done from outside, with signals.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from localrun import kv_folders
from localrun.models import builtin
from tests.daemon import Daemon, running_daemon
from tests.faults.injection import Injected
from tests.faults.postcondition import unharmed

PATIENCE_S = 60.0
PROMPT = "The same long beginning of a conversation, again and again. " * 6
LONG: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def wait_for(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def engine_pids(daemon: Daemon) -> dict[str, int]:
    engines = daemon.http.get("/localrun/v1/snapshot").json()["engines"]
    return {engine["model"]: engine["pid"] for engine in engines}


def text_of(response: httpx2.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


# --- 40: killed engines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", pytest.param("SIGABRT", marks=pytest.mark.deep)])
def test_fault_40_a_killed_engine_s_streams_go_on_and_others_never_notice(real_daemon: Daemon, name: str) -> None:
    copy = real_daemon.home / "other.gguf"
    copy.write_bytes(builtin.MODEL_PATH.read_bytes())
    models = ("tiny", str(copy))
    body = ENDLESS | {"max_tokens": 900, "temperature": 0, "stream_options": {"include_usage": True}}
    with unharmed(real_daemon, may_trace=True):
        for model in models:
            text_of(real_daemon.post("/v1/completions", model=model, prompt="x", max_tokens=1))
        events: list[list[str]] = [[], []]
        readers = [
            threading.Thread(target=streamed, args=(real_daemon, body | {"model": model}, seen))
            for model, seen in zip(models, events, strict=True)
        ]
        for reader in readers:
            reader.start()
        wait_for(lambda: all(events))
        pids = engine_pids(real_daemon)
        os.kill(pids["tiny"], getattr(signal, name))
        for reader in readers:
            reader.join()
        assert [seen[-1] for seen in events] == ["data: [DONE]"] * 2
        usages = [json.loads(seen[-2].removeprefix("data: "))["usage"] for seen in events]
        assert [usage["completion_tokens"] for usage in usages] == [body["max_tokens"]] * 2
        after = engine_pids(real_daemon)
        assert after.pop("tiny") != pids.pop("tiny")
        assert after == pids


# --- 41: decodes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Injected:
    return Injected(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def real(faults: Injected) -> Iterator[Daemon]:
    """With a real engine; without a disk tier, whose files would outlive `clear`."""
    with running_daemon("--slots", "2", fake=False, **faults.environment) as daemon:
        yield daemon


# No room (1), aborted (2) and broken off (-3), with and without the micro-batches before the failure.
FAILURES = [([1], False), ([1, 1], False), ([2], False), ([2], True), ([-3], False), ([-3], True), ([2, -3], True)]


def test_fault_41_a_decode_that_fails_is_done_again(real: Daemon, faults: Injected) -> None:
    """At the prompt and at each of the first steps: the answer is what it would have been."""
    with unharmed(real):
        right = text_of(real.post("/v1/completions", LONG))
        pids = engine_pids(real)
        for returns, computes in FAILURES:
            for step in (1, 2, 3, 9):
                clear(real)
                faults.plan(what="llama_decode", at=step, returns=returns, computes=computes)
                answer = real.post("/v1/completions", LONG)
                faults.end()
                assert faults.n_met, f"no step {step}"
                assert text_of(answer) == right, (step, returns)
        assert engine_pids(real) == pids


def test_fault_41_a_refused_batch_fails_one_request_and_the_engine_lives(real: Daemon, faults: Injected) -> None:
    with unharmed(real):
        text_of(real.post("/v1/completions", LONG))
        pids = engine_pids(real)
        for step in (1, 2, 5):
            faults.plan(what="llama_decode", at=step, returns=[-1])
            answer = real.post("/v1/completions", LONG)
            faults.end()
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed"), answer.text
        assert engine_pids(real) == pids


def test_fault_41_decodes_that_always_fail_end_the_engine_and_not_the_daemon(real: Daemon, faults: Injected) -> None:
    with unharmed(real, may_trace=True):
        faults.plan(what="llama_decode", at=3, returns=[-3] * 1_000)
        answer = real.post("/v1/completions", LONG)
        faults.end()
        assert answer.status_code == 500, answer.text
        assert answer.json()["error"]["code"] in ("engine_failed", "engine_died")
        text_of(real.post("/v1/completions", LONG))


def test_fault_41_state_that_cannot_be_set_is_computed_again(faults: Injected, tmp_path: Path) -> None:
    """What another process saved on disk is read back and refused by llama.cpp: a miss, with the same answer."""
    home = {"LOCALRUN_HOME": str(tmp_path / "home"), "LOCALRUN_THREADS": "1"}
    right = saved(home)
    with running_daemon("--slots", "2", fake=False, **faults.environment | home) as daemon, unharmed(daemon):
        faults.plan(what="state_set", at=1, returns=[0] * 1_000)
        answer = daemon.post("/v1/completions", LONG)
        faults.end()
        assert faults.n_met, "nothing was read back"
        assert text_of(answer) == right


def test_fault_41_damaged_and_foreign_state_is_a_miss(tmp_path: Path) -> None:
    home = {"LOCALRUN_HOME": str(tmp_path / "home")}
    right = saved(home)
    root = kv_folders.kv_folder(tmp_path / "home" / "cache")
    (folder,) = [folder for folder in kv_folders.survey(root) if folder.n_entries]
    sound = {file.path: file.path.read_bytes() for file in folder.files}
    with running_daemon("--slots", "2", fake=False, **home) as daemon, unharmed(daemon):
        for damage, n_cached in ((flipped, 0), (cut, 0), (foreign, 0), (emptied, 0), (bytes, 1)):
            daemon.post("/api/generate", model="tiny", keep_alive=0)
            wait_for(lambda: not engine_pids(daemon))
            for path, content in sound.items():
                path.write_bytes(damage(content))
            answer = daemon.post("/v1/completions", LONG).json()
            assert answer["choices"][0]["text"] == right, damage
            assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == n_cached, damage


def flipped(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]


def cut(content: bytes) -> bytes:
    return content[:-1]


def foreign(content: bytes) -> bytes:
    """As another build of llama.cpp would have saved it."""
    return content[:8] + bytes(16) + content[24:]


def emptied(_: bytes) -> bytes:
    return b""


def saved(home: dict[str, str]) -> str:
    """The answer of a daemon that has saved on disk what it computed, and ended."""
    with running_daemon("--slots", "2", fake=False, **home) as daemon:
        text = text_of(daemon.post("/v1/completions", LONG))
        daemon.stop()
    root = kv_folders.kv_folder(Path(home["LOCALRUN_HOME"]) / "cache")
    assert any(folder.n_entries for folder in kv_folders.survey(root)), "nothing was saved"
    return text


def clear(daemon: Daemon) -> None:
    """What is kept of prompts is forgotten."""
    daemon.http.request("DELETE", "/localrun/v1/cache").raise_for_status()


# --- 42: processes ---------------------------------------------------------------------------------------------------

ENDLESS: dict[str, Any] = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 1_900, "ignore_eos": True}


def streamed(daemon: Daemon, body: dict[str, Any], seen: list[str]) -> None:
    """Reads a stream to its end, whatever that is."""
    try:
        with httpx2.stream("POST", f"{daemon.url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
            seen.extend(line for line in response.iter_lines() if line.startswith("data:"))
    except httpx2.HTTPError as error:
        seen.append(repr(error))


def test_fault_42_a_stopped_engine_is_noticed_and_replaced(tmp_path: Path) -> None:
    hasty = Injected(
        tmp_path, localrun__server__engines__faults__CHECK_EVERY_S=0.2, localrun__server__engines__faults__SILENT_S=1.0
    )
    with running_daemon(LOCALRUN_FAKE_STEP_MS="10", **hasty.environment) as daemon, unharmed(daemon):
        seen: list[str] = []
        reading = threading.Thread(target=streamed, args=(daemon, ENDLESS | {"max_tokens": 300}, seen))
        reading.start()
        wait_for(lambda: seen)
        pid = engine_pids(daemon)["tiny"]
        os.kill(pid, signal.SIGSTOP)
        reading.join()
        assert "hung" in daemon.log
        assert not psutil.pid_exists(pid)
        assert seen[-1] == "data: [DONE]", "the stream went on"


def test_fault_42_sigterm_ends_streams_engines_and_daemon() -> None:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="10") as daemon:
        seen: list[str] = []
        reading = threading.Thread(target=streamed, args=(daemon, ENDLESS, seen))
        reading.start()
        wait_for(lambda: engine_pids(daemon).get("tiny"))
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        assert children
        assert daemon.stop(signal.SIGTERM) == 0
        reading.join()
        assert "error" in seen[-1] or seen[-1] == "data: [DONE]", seen[-1]
        assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == [], "no orphans"
        assert "Traceback" not in daemon.log


def test_fault_42_children_end_when_the_daemon_is_killed() -> None:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="10") as daemon:
        reading = threading.Thread(target=streamed, args=(daemon, ENDLESS, []))
        reading.start()
        wait_for(lambda: engine_pids(daemon).get("tiny"))
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        reading.join()
        assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == [], "no orphans"


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0], ids=["forward", "back"])
def test_fault_42_a_clock_that_jumps_ends_no_stream_and_unloads_no_model(tmp_path: Path, jump_s: float) -> None:
    faults = Injected(tmp_path)
    with running_daemon(LOCALRUN_FAKE_STEP_MS="5", **faults.environment) as daemon, unharmed(daemon):
        seen: list[str] = []
        body = ENDLESS | {"max_tokens": 100, "deadline_s": 60}
        reading = threading.Thread(target=streamed, args=(daemon, body, seen))
        reading.start()
        wait_for(lambda: engine_pids(daemon).get("tiny"))
        pids = engine_pids(daemon)
        faults.plan(what="clock", jump_s=jump_s)
        reading.join()
        assert seen[-1] == "data: [DONE]", seen[-1]
        assert engine_pids(daemon) == pids
        (row,) = daemon.http.get("/localrun/v1/snapshot").json()["engines"]
        assert row["state"] in ("ready", "idle"), row
        faults.end()


def test_fault_42_a_busy_port_is_named_with_its_holder_and_the_way_out() -> None:
    """Another program's port, then another daemon's: exit code 3."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = second_daemon(taken.getsockname()[1])
        assert "--port" in said
    with running_daemon() as daemon, unharmed(daemon):
        said = second_daemon(daemon.port)
        assert "localrun" in said


def second_daemon(port: int) -> str:
    command = [sys.executable, "-m", "localrun", "serve", "--port", str(port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3, ended.stderr
    assert str(port) in ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr
