"""`localrun bench tune` as a user calls it, on the built-in model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localrun import thread_choice
from localrun.cli import exits
from localrun.cli.root import run
from localrun.processors import usable

ARGUMENTS = ["bench", "tune", "tiny", "--rounds", "1", "--threads", "1,2"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
    return tmp_path


def test_it_is_a_command_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "tune", "--help"]) == exits.OK
    assert "bench tune" in capsys.readouterr().out.splitlines()[0]


def test_it_shows_a_table_and_keeps_the_best_unless_told_not_to(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(thread_choice, "MOST_OTHERS", 99)  # whoever else computes here now
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
    assert "by an earlier measurement" in shown
    assert str(path) in shown.splitlines()[-1]
    assert [each.model for each in thread_choice.read(path)] == ["tiny"]


def test_nothing_is_kept_while_others_compute(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(thread_choice, "MOST_OTHERS", -1)
    assert run([*ARGUMENTS[:-1], "1"]) == exits.OK
    lines = capsys.readouterr().out.splitlines()
    assert "disturbed   other programs took" in lines[-2]
    assert lines[-1] == "saved       nothing"
    assert not (home / "cache" / "threads.json").exists()


def test_a_model_that_is_not_there(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "tune", "nobody"]) == exits.MODEL_NOT_FOUND
    error = capsys.readouterr().err
    assert "nobody" in error
    assert error.count("\n") == 1
