"""Breaking things on purpose, with real engines: what is lost, and what goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.daemon import Daemon, running_daemon


def _stream(daemon: Daemon, model: str, n_predict: int) -> Iterator[dict[str, Any]]:
    options = {"num_predict": n_predict, "temperature": 0}  # a random model may draw its end at any time
    body = {"model": model, "prompt": "Tell me a story.", "options": options, "raw": True}
    with daemon.http.stream("POST", "/api/generate", json=body) as response:
        for line in response.iter_lines():
            yield json.loads(line)


def _pids(daemon: Daemon) -> dict[str, int]:
    engines = daemon.http.get("/localrun/v1/snapshot").json()["engines"]
    return {engine["model"]: engine["pid"] for engine in engines}


def _answer(daemon: Daemon, model: str) -> str:
    response = daemon.post("/v1/completions", model=model, prompt="Hello", max_tokens=8, temperature=0, ignore_eos=True)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_without_resume_a_killed_engine_ends_its_streams_and_nothing_else(other_model: Path) -> None:
    # Steps of the small model are too quick to be interrupted; a long answer of the random one is not.
    with running_daemon("--kv-cells", "65536", "--threads", "1", "--resume", "off", fake=False) as daemon:
        before = _answer(daemon, "tiny")
        lines = _stream(daemon, str(other_model), 4000)
        next(lines)
        pids = _pids(daemon)
        os.kill(pids[str(other_model)], signal.SIGKILL)
        last = list(lines)[-1]
        assert "SIGKILL" in last["error"]
        assert _pids(daemon)["tiny"] == pids["tiny"], "the other engine never noticed"
        assert _answer(daemon, "tiny") == before
        assert _answer(daemon, str(other_model)), "the next request starts a new engine"
        assert _pids(daemon)[str(other_model)] != pids[str(other_model)]


def test_a_busy_port_is_named_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "localrun", "serve", "--port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3
    assert str(port) in ended.stderr
    assert "--port" in ended.stderr


def test_a_client_that_leaves_frees_its_slot(daemon: Daemon, other_model: Path) -> None:
    lines = _stream(daemon, str(other_model), 4000)
    next(lines)
    lines.close()
    deadline_s = time.monotonic() + 60
    while daemon.http.get("/localrun/v1/snapshot").json()["aggregate"]["running"]:
        assert time.monotonic() < deadline_s, "the request still runs"
        time.sleep(0.05)
