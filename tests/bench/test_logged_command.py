from __future__ import annotations

import sys
from pathlib import Path

import pytest

from localrun.bench.logged_command import percent_done, run_logged


@pytest.mark.parametrize(
    ("line", "percent"),
    [
        ("[  0%] Building C object a.o", 0), ("[ 57%] Linking", 57), ("[100%] Built target", 100),
        ("[12/48] Building", 25), ("[48/48] Linking", 100), ("[0/0] Re-checking", 0),
        ("-- Configuring done", None), ("warning: [57%]", None), ("", None),
    ],
)  # fmt: skip
def test_how_far_a_build_is(line: str, percent: int | None):
    assert percent_done(line) == percent


def run(program: str, log: Path) -> str:
    return run_logged([sys.executable, "-c", program], log, lambda _: None)


def test_all_output_is_in_the_log_and_a_second_command_adds_to_it(tmp_path: Path):
    log = tmp_path / "log"
    assert run("import sys; print('out'); print('err', file=sys.stderr)", log) == ""
    assert run("print('again')", log) == ""
    assert sorted(log.read_text().split()) == ["again", "err", "out"]


def test_a_failure_has_its_status_and_the_end_of_its_own_output(tmp_path: Path):
    run("print('of another command')", tmp_path / "log")
    failed = run("for n in range(100): print('line', n)\nraise SystemExit(7)", tmp_path / "log")
    assert failed.startswith("status 7; ")
    assert failed.endswith("line 99")
    assert "line 50" not in failed
    assert "another command" not in failed


def test_a_command_that_does_not_exist_is_a_failure(tmp_path: Path):
    assert "nowhere cannot be started" in run_logged(["/nowhere"], tmp_path / "log", lambda _: None)
