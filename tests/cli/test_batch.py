"""`localrun batch` against a real daemon with fake engines, and how far a batch is as a line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localrun.cli.batch import BatchMeter
from tests.daemon import Daemon, running_daemon

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


@pytest.fixture
def batch(daemon: Daemon) -> Run:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "localrun", "--port", str(daemon.port), "batch", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run


def written(path: Path, n_lines: int, **body: object) -> Path:
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 2} | body
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": asked} for n in range(n_lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_results_are_beside_the_file(batch: Run, tmp_path: Path):
    done = batch(str(written(tmp_path / "asked.jsonl", 12)))
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in (tmp_path / "asked.results.jsonl").read_text().splitlines()]
    assert [one["custom_id"] for one in results] == [f"r{n}" for n in range(12)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asked.jsonl", "asked.results.jsonl"]
    assert "12 of 12 done" in done.stdout
    assert "completed  100%  12 / 12" in done.stderr


def test_without_waiting_the_id_is_all_and_the_results_come_later(batch: Run, tmp_path: Path):
    batch_id = batch(str(written(tmp_path / "asked.jsonl", 3)), "--no-wait").stdout.strip()
    assert len(batch("results", batch_id).stdout.splitlines()) == 3
    assert json.loads(batch("show", batch_id).stdout)["status"] == "completed"
    assert batch_id in batch("list").stdout
    assert batch_id in {row["id"] for row in json.loads(batch("list", "--json").stdout)}
    refused = batch("cancel", batch_id)
    assert (refused.returncode, refused.stderr.startswith("error: batch")) == (1, True)


def test_failed_lines_and_bad_files_are_an_exit_code(batch: Run, daemon: Daemon, tmp_path: Path):
    done = batch(str(written(tmp_path / "asked.jsonl", 2, temperature=-1)))
    assert (done.returncode, "2 failed" in done.stdout) == (1, True)
    done = batch(str(written(tmp_path / "nobody.jsonl", 1, model="nobody")))
    assert (done.returncode, "line 1: the model 'nobody' is not here" in done.stderr) == (1, True)
    files = daemon.http.get("/v1/files").json()
    refused = batch(str(tmp_path / "asked.jsonl"), "--window", "40d")
    assert (refused.returncode, "'40d' cannot be used; write a time from 1s to 30d" in refused.stderr) == (1, True)
    assert daemon.http.get("/v1/files").json() == files  # a file that no batch reads is not left behind
    (tmp_path / "text.jsonl").write_text("hello\n")
    assert batch(str(tmp_path / "text.jsonl")).returncode == 2
    assert batch(str(tmp_path / "none.jsonl")).returncode == 2


def test_the_line_has_the_rate_of_the_last_minute_and_the_time_left():
    meter = BatchMeter()
    for now_s, done in ((0.0, 0), (10.0, 20), (20.0, 40)):
        counts = {"completed": done, "failed": 0, "total": 100}
        meter.add({"status": "in_progress", "request_counts": counts}, now_s)
    assert meter.line() == "in_progress   40%  40 / 100  2.0/s  30 s left"
