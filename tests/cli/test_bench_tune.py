"""`localrun bench tune` as a user calls it, on the built-in model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localrun.cli import exits
from localrun.cli.root import run
from localrun.processors import usable
from tests.cli.conftest import Localrun


def test_it_is_a_command_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "tune", "--help"]) == exits.OK
    assert "bench tune" in capsys.readouterr().out.splitlines()[0]


def test_it_shows_a_table_and_keeps_the_best_unless_told_not_to(localrun: Localrun, tmp_path: Path) -> None:
    arguments = ("bench", "tune", "tiny", "--rounds", "1", "--threads", "1,2")
    tried = localrun(*arguments, "--dry-run")
    assert tried.returncode == exits.OK, tried.stderr
    lines = tried.stdout.splitlines()
    assert [line.split()[0] for line in lines if line[:1].isdigit()] == ["1", "2"]
    assert any(line.split() == ["affinity", *_affinity()] for line in lines)
    assert lines[-1] == "kept        nothing"
    assert list(tmp_path.rglob("threads.json")) == []
    kept = json.loads(localrun(*arguments, "--json").stdout)
    assert kept["before"] is None
    (path,) = tmp_path.rglob("threads.json")
    assert kept["kept_at"] == str(path)
    assert json.loads(path.read_text())[0]["threads"] == kept["tuning"]["best"]
    again = localrun(*arguments)
    assert "by an earlier measurement" in again.stdout
    assert str(path) in again.stdout.splitlines()[-1]
    assert len(json.loads(path.read_text())) == 1
    assert "tiny" in next(line for line in localrun("doctor").stdout.splitlines() if " threads " in line)


def test_a_model_that_is_not_there(localrun: Localrun) -> None:
    done = localrun("bench", "tune", "nobody")
    assert (done.returncode, done.stderr.count("\n")) == (exits.MODEL_NOT_FOUND, 1)
    assert "nobody" in done.stderr


def _affinity() -> list[str]:
    found = usable()
    numbers = f"processors {found.numbers}" if found.numbers else "all processors"
    return f"{numbers} of {found.n_machine}".split()
