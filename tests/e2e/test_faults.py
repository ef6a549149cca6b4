"""Breaking things on purpose, with real engines: what is lost, and what goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon, running_daemon


def _stream(daemon: Daemon, model: str, n_predict: int) -> Iterator[dict[str, Any]]:
    body = {"model": model, "prompt": "Tell me a story.", "options": {"num_predict": n_predict}, "raw": True}
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


def test_a_killed_engine_ends_its_streams_at_once_and_nothing_else(other_model: Path) -> None:
    # Steps of the small model are too quick to be interrupted; a long answer of the random one is not.
    with running_daemon("--kv-cells", "65536", "--threads", "1", fake=False) as daemon:
        before = _answer(daemon, "tiny")
        lines = _stream(daemon, str(other_model), 4000)
        next(lines)
        pids = _pids(daemon)
        os.kill(pids[str(other_model)], signal.SIGKILL)
        killed_at_s = time.monotonic()
        last = list(lines)[-1]
        assert time.monotonic() - killed_at_s < 5, "the stream has to end when its engine ends"
        assert "SIGKILL" in last["error"]
        assert _pids(daemon)["tiny"] == pids["tiny"], "the other engine never noticed"
        assert _answer(daemon, "tiny") == before
        assert _answer(daemon, str(other_model)), "the next request starts a new engine"
        assert _pids(daemon)[str(other_model)] != pids[str(other_model)]


def test_a_full_queue_refuses_with_429_and_serves_the_rest(other_model: Path) -> None:
    arguments = ("--slots", "1", "--max-queue", "2", "--kv-cells", "8192", "--threads", "1")
    with running_daemon(*arguments, fake=False) as daemon:
        statuses: list[int] = []
        body = {"model": str(other_model), "prompt": "x", "max_tokens": 1500, "ignore_eos": True}

        def ask() -> None:
            statuses.append(daemon.post("/v1/completions", body).status_code)

        _answer(daemon, str(other_model))
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 3, "one that runs and two that wait are served"
        assert daemon.http.get("/health").status_code == 200


@pytest.mark.parametrize("damage", ["truncated", "not a model", "empty", "missing"])
def test_a_damaged_file_is_a_clear_error_and_other_models_go_on(
    daemon: Daemon, tmp_path: Path, other_model: Path, damage: str
) -> None:
    path = tmp_path / "broken.gguf"
    content = {"truncated": other_model.read_bytes()[:100_000], "not a model": b"#!/bin/sh\n" * 99, "empty": b""}
    if damage in content:
        path.write_bytes(content[damage])
    response = daemon.post("/v1/completions", model=str(path), prompt="Hello")
    assert response.status_code == (404 if damage == "missing" else 422)
    assert "broken.gguf" in response.json()["error"]["message"]
    assert _answer(daemon, "tiny")


def test_a_prompt_longer_than_the_context_names_both_numbers(daemon: Daemon) -> None:
    response = daemon.post("/v1/completions", model="tiny", prompt=[65] * 5000)
    assert response.status_code == 400
    assert "5000" in response.json()["error"]["message"]
    assert "4096" in response.json()["error"]["message"]


def test_a_client_that_leaves_frees_its_slot(daemon: Daemon, other_model: Path) -> None:
    lines = _stream(daemon, str(other_model), 4000)
    next(lines)
    lines.close()
    deadline_s = time.monotonic() + 20
    while daemon.http.get("/localrun/v1/snapshot").json()["aggregate"]["running"]:
        assert time.monotonic() < deadline_s, "the request still runs"
        time.sleep(0.05)
