"""Against a scripted executable, started as llama-server would be."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import httpx2
import psutil
import pytest

from localrun.bench.servers import ServerFlags, ServerProcess, local_server
from localrun.errors import LocalrunError
from tests.support.synthesis.synthesize import synthesize

SCRIPT = Path(__file__).with_name("scripted_server.py")


def scripted(folder: Path, **environ: str) -> ServerProcess:
    environ["SCRIPT_CALLS"] = str(folder / "calls")
    return ServerProcess(
        "scripted", [sys.executable, str(SCRIPT)], "m", folder / "log", environ=environ, files=folder / "files"
    )


def calls(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_a_started_server_is_a_target_and_is_gone_afterwards(tmp_path: Path):
    with scripted(tmp_path, SCRIPT_UNHEALTHY="3") as server:
        target = server.target
        assert (target.name, target.model) == ("scripted", "m")
        assert target.pid is not None
        assert calls(tmp_path) == [{"pid": target.pid, "arguments": ["--port", target.base_url.rpartition(":")[2]]}]
        assert psutil.pid_exists(target.pid)
    assert not psutil.pid_exists(target.pid)


def test_a_restart_is_another_process_at_the_same_address(tmp_path: Path):
    with scripted(tmp_path) as server:
        before = server.target
        server.restart()
        assert server.target.base_url == before.base_url
        assert server.target.pid != before.pid


def test_resident_memory_is_that_of_the_process(tmp_path: Path):
    with scripted(tmp_path) as server:
        own = psutil.Process(server.target.pid).memory_info().rss
        assert 0.5 < server.rss_bytes() / own < 2


def test_resident_memory_includes_children(tmp_path: Path):
    child = f"import subprocess,sys;sys.exit(subprocess.call([{sys.executable!r},{str(SCRIPT)!r},*sys.argv[1:]]))"
    with ServerProcess("parent", [sys.executable, "-c", child], "m", tmp_path / "log") as server:
        parent = psutil.Process(server.target.pid)
        [served] = parent.children()
        both = parent.memory_info().rss + served.memory_info().rss
        assert 0.8 < server.rss_bytes() / both < 1.25
    assert not served.is_running()


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(tmp_path: Path):
    with pytest.raises(LocalrunError, match=r"(?s)status 3; .*from another planet"):
        scripted(tmp_path, SCRIPT_STATUS="3").start()


def test_a_server_that_refuses_its_first_request_is_an_error_and_is_ended(tmp_path: Path):
    server = scripted(tmp_path, SCRIPT_REFUSES="500")
    with pytest.raises(LocalrunError, match="status 500"):
        server.start()
    assert not psutil.pid_exists(int(str(calls(tmp_path)[0]["pid"])))
    with pytest.raises(LocalrunError, match="does not run"):
        _ = server.target


def test_a_server_that_ended_while_it_was_measured_is_an_error(tmp_path: Path):
    with scripted(tmp_path) as server:
        process = psutil.Process(server.target.pid)
        process.kill()
        process.wait(30)
        with pytest.raises(LocalrunError, match="ended while it was measured"):
            server.rss_bytes()


def test_what_is_no_program_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(LocalrunError, match="/nowhere/llama-server"):
        ServerProcess("peer", ["/nowhere/llama-server"], "m", tmp_path / "log").start()


def test_files_outlive_a_restart_until_they_are_forgotten(tmp_path: Path):
    kept = tmp_path / "files" / "cache"
    kept.parent.mkdir()
    kept.touch()
    with scripted(tmp_path) as server:
        server.restart()
    assert kept.exists()
    server.forget()
    assert not kept.parent.exists()


def test_our_daemon_has_a_home_of_its_own_and_never_unloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCALRUN_HOME", "/somewhere/else")
    flags = ServerFlags(model=Path("tiny"), slots=3, kv_cells=1024, threads=1, latency="throughput")
    with local_server(flags, tmp_path) as server:
        assert server.target.can_switch
        command = psutil.Process(server.target.pid).cmdline()
        expected = {"--slots": "3", "--kv-cells": "1024", "--threads": "1", "--latency": "throughput"}
        for name, value in (expected | {"--keep-alive-s": "-1", "--host": "127.0.0.1"}).items():
            assert command[command.index(name) + 1] == value
        assert psutil.Process(server.target.pid).environ()["LOCALRUN_HOME"] == str(tmp_path / "home")
    assert os.environ["LOCALRUN_HOME"] == "/somewhere/else"


@pytest.mark.slow
def test_a_started_daemon_has_its_model_loaded_and_so_it_has_after_a_restart(tmp_path: Path):
    model = tmp_path / "tiny.gguf"
    synthesize("tiny", "Q4_0", model)
    flags = ServerFlags(model=model, slots=2, kv_cells=1024, threads=1, latency="balanced")

    def loaded(server: ServerProcess) -> list[str]:
        answer = httpx2.get(f"{server.target.base_url}/api/ps", trust_env=False, timeout=60)
        return [each["name"] for each in answer.json()["models"]]

    with local_server(flags, tmp_path) as server:
        [name] = loaded(server)
        assert server.rss_bytes() > 2 * model.stat().st_size
        server.restart()
        assert loaded(server) == [name]
        children = psutil.Process(server.target.pid).children(recursive=True)
        assert children
    assert not any(child.is_running() for child in children)
