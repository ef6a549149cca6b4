"""schemathesis sends whatever the document allows, and what it does not, to a real daemon with fake engines: nothing
fails inside, nothing hangs, every answer is as the document says, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localrun.server.openapi.operations import document
from tests.daemon import Daemon
from tests.depth import DEPTH
from tests.server.openapi.narrowed import finite, narrowed

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# 501 is the answer of what is known and not done, 502 that of a pull whose source cannot be reached.
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 501]

[[operations]]
include-path = "/api/pull"
checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 502]
"""
MODELS = ("tiny", "bert", "ranker", "code")
# Every field at its edges, which is always the same, and then at random.
PHASES = ("--phases", "coverage" if DEPTH == 1 else "coverage,fuzzing", "--max-examples", str(2 * DEPTH))


def fuzz(
    daemon: Daemon, folder: Path, *arguments: str, seed: int = 1, checks: str = CHECKS, narrows: bool = True
) -> None:
    """It has found nothing when it ends with 0. Its own threads (`--workers`) trip over the parser of Python 3.11."""
    folder.mkdir(exist_ok=True)
    (folder / "openapi.json").write_text(json.dumps(narrowed(document()) if narrows else finite(document())))
    (folder / "schemathesis.toml").write_text(CONFIG)
    command = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", "schemathesis.toml", "run"]
    command += ["openapi.json", "--url", daemon.url, "--checks", checks, "--request-timeout", "30"]
    command += ["--seed", str(seed), "--no-shrink", "--continue-on-failure", "--warnings", "off", "--no-color"]
    # For each request it looks through all variables for proxies.
    few = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        [*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=900, check=False, env=few
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def check_nothing_is_left(daemon: Daemon) -> None:
    """No request, no held cell, no lease: each model can be unloaded at once, which it cannot while one is held."""
    snapshot = _settled(daemon)
    final = {"done", "cancelled", "failed"}
    assert [row for row in snapshot["requests"] if row["state"] not in final] == []
    for engine in snapshot["engines"]:
        assert (engine["slots_busy"], engine["queued"]) == (0, 0)
        # What is still in cells is kept for later, and belongs to nobody.
        assert [run for run in engine["kv_runs"] if run[2] is not None] == []
    assert daemon.http.get("/health").status_code == 200
    for model in MODELS:
        daemon.post("/api/generate", model=model, keep_alive=0)
    deadline_s = time.monotonic() + 60
    while daemon.http.get("/api/ps").json()["models"] and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert daemon.http.get("/api/ps").json()["models"] == []
    assert "Traceback" not in daemon.log


def _settled(daemon: Daemon) -> dict[str, Any]:
    """The last requests end within a step or two; the telemetry tells of it a moment later."""
    deadline_s = time.monotonic() + 60
    while True:
        snapshot: dict[str, Any] = daemon.http.get("/localrun/v1/snapshot").json()
        aggregate = snapshot["aggregate"]
        busy = aggregate["running"] + aggregate["queued"] + sum(row["slots_busy"] for row in snapshot["engines"])
        if not busy or time.monotonic() > deadline_s:
            return snapshot
        time.sleep(0.1)


def test_requests_at_every_edge_break_nothing(daemon: Daemon, tmp_path: Path):
    """Some at random come at the same time: models are removed under others' requests, and made again."""
    at_random = ("--phases", "fuzzing", "--max-examples", str(DEPTH))
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(fuzz, daemon, tmp_path / "beside", *at_random, seed=2)
        fuzz(daemon, tmp_path / "edges", *PHASES, "--mode", "positive")
        beside.result()
    served = daemon.http.get("/localrun/v1/snapshot").json()["aggregate"]
    # Or it has tested nothing but how bodies are refused.
    assert served["requests_total"] > 500
    assert served["output_tokens_total"] > 1000
    check_nothing_is_left(daemon)


@pytest.mark.slow
def test_what_the_document_forbids_is_refused(daemon: Daemon, tmp_path: Path):
    """Else it says less than the daemon takes, or the daemon ignores what it should refuse."""
    checks = f"{CHECKS},negative_data_rejection"
    fuzz(daemon, tmp_path, *PHASES, "--mode", "negative", "--exclude-path", "/api/pull", checks=checks, narrows=False)
    check_nothing_is_left(daemon)
