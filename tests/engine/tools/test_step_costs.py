"""What is measured can be read; no figures are compared."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from localrun import wire
from localrun.engine.tools.step_costs import StepCosts
from tests.fakes.backend import FakeBackend


def opened(path: Path, n_slots: int) -> wire.Open:
    return wire.Open(
        model_path=str(path), n_slots=n_slots, n_kv_cells=2048, n_batch=128, n_threads=1, n_gpu_layers=0, kv_type="f16",
        target_itl_s=0.1, ram_cache_bytes=0, max_queue=8,
    )  # fmt: skip


@pytest.mark.parametrize("n_slots", [2, 1])
def test_every_phase_says_something(tiny_gguf: Path, n_slots: int) -> None:
    command = [sys.executable, "-P", "-m", "localrun.engine.tools.step_costs", "--seconds", "1.5", "--heads", "4"]
    done = subprocess.run(
        command, input=msgspec.json.encode(opened(tiny_gguf, n_slots)), stdout=subprocess.PIPE, check=True
    )
    first, *lines, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert first["layout"]["slots"] == n_slots
    assert first["layout"]["is_split"] == (n_slots > 1)
    assert first["layout"]["state_token_bytes"] > 0
    assert last["others"] >= 0
    phases = {line["phase"] for line in lines}
    several = {"waits", "batch", "copy", "save", "restore", "drafts"} if n_slots > 1 else set()
    assert phases == {"streams", "alone_drafts", "background", "beside", "disk", "rebuild"} | several
    assert {line["rows"] for line in lines if line["phase"] == "streams"} == set(range(1, n_slots + 1))
    assert all(line["seconds"] > 0 and line["spread"] >= 0 for line in lines)
    for waits in (line["quantiles"] for line in lines if line["phase"] == "waits"):
        assert len(waits) == 11
        assert waits == sorted(waits)


def test_a_model_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"no model")
    command = [sys.executable, "-P", "-m", "localrun.engine.tools.step_costs"]
    done = subprocess.run(command, input=msgspec.json.encode(opened(path, 2)), capture_output=True, check=False)
    assert done.returncode == 1
    assert str(path).encode() in done.stderr


def test_nobody_asks_and_nothing_is_said() -> None:
    """The command that started it was interrupted before it said what is to be measured."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "localrun.engine.tools.step_costs"], input=b"", capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def test_no_prompt_is_measured_deeper_than_its_cells() -> None:
    """Of 700, with all the time in the world: 512 tokens and 64 more fit, and 1,024 do not."""
    lines = io.StringIO()
    StepCosts(FakeBackend(n_cells=700, n_seqs=1, n_batch=512), lines, 1e6).measure(1)
    said = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert {line["tokens"] for line in said if line["phase"] == "beside"} == {0, 512}
