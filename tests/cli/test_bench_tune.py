"""`localrun bench tune` as a user calls it. What it measures is made up; `tests/bench/test_tune.py` measures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from localrun.bench.tune import STREAMS, StepTiming, Tuning
from localrun.cli import exits
from localrun.cli.root import run
from localrun.hardware import thread_choice
from localrun.hardware.processors import Processors, usable
from localrun.hardware.thread_choice import ModelShape, Threads
from localrun.models.storage.model import Model

ARGUMENTS = ["bench", "tune", "tiny", "--rounds", "1", "--threads", "1,2"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
    monkeypatch.setattr("localrun.bench.tune.tune", _measured)
    return tmp_path


def _measured(
    model: Model, processors: Processors, counts: Sequence[int], *, rounds: int,
    on_measured: Callable[[StepTiming], None],
) -> Tuning:  # fmt: skip
    """More threads are better, and somebody else takes half a processor."""
    rows = [(streams, 1) for streams in STREAMS] + [(1, 512)]
    measured = [
        StepTiming(threads=n_threads, streams=streams, rows=n_rows, seconds=n_rows / n_threads)
        for _ in range(rounds)
        for n_threads in counts
        for streams, n_rows in rows
    ]
    for each in measured:
        on_measured(each)
    best = Threads(decode=max(counts), prompt=max(counts))
    return Tuning(
        model=model.name, shape=ModelShape(2, 1000), processors=processors, build="made", measured=measured, best=best,
        others=0.5,
    )  # fmt: skip


def test_it_is_a_command_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "tune", "--help"]) == exits.OK
    assert "bench tune" in capsys.readouterr().out.splitlines()[0]


def test_it_shows_a_table_and_keeps_the_best_unless_told_not_to(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(thread_choice, "MOST_OTHERS", 99)
    path = home / "cache" / "threads.json"
    assert run([*ARGUMENTS, "--dry-run"]) == exits.OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[:1].isdigit()] == ["1", "2"]
    found = usable()
    numbers = f"processors {found.numbers}" if found.numbers else "all processors"
    assert f"affinity    {numbers} of {found.n_machine}" in lines
    assert lines[-1] == "saved       nothing"
    assert not path.exists()
    assert run([*ARGUMENTS, "--json"]) == exits.OK
    kept = json.loads(capsys.readouterr().out)
    assert (kept["before"], kept["kept_at"]) == (None, str(path))
    assert json.loads(path.read_text())[0]["threads"] == kept["tuning"]["best"]
    assert run(ARGUMENTS) == exits.OK
    shown = capsys.readouterr().out
    assert "earlier" in next(line for line in shown.splitlines() if line.startswith("until now"))
    assert str(path) in shown.splitlines()[-1]
    assert [each.model for each in thread_choice.read(path)] == ["tiny"]


def test_nothing_is_kept_while_others_compute(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ARGUMENTS[:-1], "1"]) == exits.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("disturbed ")
    assert "0.5 processors" in lines[-2]
    assert lines[-1] == "saved       nothing"
    assert not (home / "cache" / "threads.json").exists()


def test_a_model_that_is_not_there(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "tune", "nobody"]) == exits.MODEL_NOT_FOUND
    error = capsys.readouterr().err
    assert "nobody" in error
    assert error.count("\n") == 1
