"""A daemon on a library with a broken kernel: requests are answered, what was found is used, and doctor says it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from localrun.hardware import kernels
from localrun.hardware.kernels import Verdict
from tests.broken_kernels import broken_q4_k
from tests.daemon import Daemon, running_daemon
from tests.support.synthesis.synthesize import synthesize


@pytest.fixture(scope="module")
def q4_k_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "q4_k.gguf"
    synthesize("tiny", "Q4_K", path)
    return path


def answer(daemon: Daemon, model: Path) -> str:
    """Of an engine that stays: the probe may take longer to come than one is usually kept."""
    body = {"model": str(model), "prompt": "Hello, how are you?", "raw": True, "stream": False, "keep_alive": -1}
    response = daemon.post("/api/generate", body | {"options": {"num_predict": 8, "temperature": 0}})
    assert response.status_code == 200, response.text
    return str(response.json()["response"])


def kept(home: Path) -> Verdict:
    pair = kernels.present_pair()
    assert pair is not None
    return kernels.read(kernels.folder(home / "cache"), pair)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 400  # the probe steps back for whatever else runs
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.mark.parametrize("signal_name", ["SIGSEGV", pytest.param("SIGILL", marks=pytest.mark.deep)])
def test_a_crash_is_answered_once_by_a_second_start_and_then_avoided(
    signal_name: str, q4_k_model: Path, tmp_path: Path
) -> None:
    preload, home = broken_q4_k(tmp_path, signal_name), tmp_path / "home"
    with running_daemon(fake=False, LD_PRELOAD=preload, LOCALRUN_HOME=str(home)) as daemon:
        text = answer(daemon, q4_k_model)
        assert text
        assert daemon.log.count("once more without the quick kernels") == 1
        wait_for(lambda: len(kept(home).crashes) == 1)
        daemon.post("/api/generate", model=str(q4_k_model), keep_alive=0)
        embedding = daemon.post("/v1/embeddings", model=str(q4_k_model), input="Hello, how are you?")
        assert embedding.status_code == 200
        assert answer(daemon, q4_k_model) == text
        assert daemon.log.count("once more without the quick kernels") == 1, "it was known"
        # Nobody asks for anything now.
        wait_for(lambda: kept(home).is_probed)
        assert {fault.how for fault in kept(home).faults if fault.weight_type == "Q4_K"} == {f"crash ({signal_name})"}
        assert len(kept(home).crashes) == 1


def test_wrong_numbers_are_found_in_a_quiet_moment_and_the_model_is_loaded_anew(
    q4_k_model: Path, tmp_path: Path
) -> None:
    preload, home = broken_q4_k(tmp_path), tmp_path / "home"
    with running_daemon(fake=False, LOCALRUN_HOME=str(tmp_path / "sound")) as daemon:
        right = answer(daemon, q4_k_model)
    with running_daemon(fake=False, LD_PRELOAD=preload, LOCALRUN_HOME=str(home)) as daemon:
        first = answer(daemon, q4_k_model)
        assert first != right, "the first answer waits for no probe"
        wait_for(lambda: daemon.http.get("/localrun/v1/snapshot").json()["engines"] == [])
        assert "compute wrong logits" in daemon.log
        assert answer(daemon, q4_k_model) == right, "neither the kernels nor what they left in the cache is used"
    program = [sys.executable, "-m", "localrun", "doctor", "--json", "--port", "0"]
    environ = os.environ | {"LOCALRUN_HOME": str(home)}
    report = json.loads(subprocess.run(program, env=environ, capture_output=True, check=False).stdout)
    (line,) = [finding for finding in report["findings"] if finding["check"] == "kernels"]
    assert line["level"] == "warn"
    assert "Q4_K in ordinary, sliding-window, recurrent (Mamba), hybrid models" in line["text"]
    assert "native_build install" in line["remedy"]


def test_a_library_that_cannot_be_loaded_is_said_in_one_line(q4_k_model: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    with running_daemon(fake=False, LLAMA_CPP_LIB_PATH=str(nothing)) as daemon:
        response = daemon.post("/v1/completions", model=str(q4_k_model), prompt="Hello", max_tokens=1)
    message = response.json()["error"]["message"]
    assert response.status_code == 500
    assert "installed without its native library" in message
    assert "native_build install --force" in message
