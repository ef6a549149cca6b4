"""What the table says of comparisons that are kept, and that none of them is made twice."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from bench import plan_accuracy
from bench.plan_accuracy import Cell, knee, read, table
from localrun.bench.arrivals import Limits
from localrun.errors import LocalrunError

FIGURES = {
    "tokens_per_s": 100.0, "ttft_p50_s": 0.2, "ttft_p95_s": 0.5, "itl_p50_s": 0.01, "itl_p95_s": 0.03,
    "cached_tokens": 400.0, "drafted_tokens": 0.0, "kept": 1.0,
}  # fmt: skip


def cell(load: int, *, made: str = "now", drafts: bool = False, real: Any = (), simulated: Any = ()) -> Cell:
    return Cell(
        calibrated_at=made,
        workload="mixed",
        drafts=drafts,
        load=load,
        knee_per_s=2.0,
        limits=Limits(),
        n_requests=80,
        real=FIGURES | dict(real),
        simulated=FIGURES | dict(simulated),
        accidents={"ttft_p95_s": 0.12},
        others=0.05,
        slowdown=1.0,
    )


def kept(path: Path, *cells: Cell) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in cells))
    return path


def test_the_knee_is_between_the_last_load_that_keeps_the_promise_and_the_first_that_does_not() -> None:
    cells = [cell(90), cell(110, real={"kept": 0.90}, simulated={"kept": 0.80})]
    assert knee(cells, simulated=False) == pytest.approx(2.0 * (0.90 + 0.20 * 0.05 / 0.10))
    assert knee(cells, simulated=True) == pytest.approx(2.0 * (0.90 + 0.20 * 0.05 / 0.20))
    assert knee(cells[:1], simulated=True) is None


def test_the_table_has_both_figures_and_the_error_of_each() -> None:
    off = cell(50, simulated={"ttft_p95_s": 0.6, "itl_p50_s": 0.0104})
    on = cell(90, drafts=True, real={"drafted_tokens": 50.0}, simulated={"drafted_tokens": 40.0})
    lines = list(table([on, off]))
    assert "| mixed | off | 50 % | 80 | 100 / 100 (+0%)" in lines[2]
    assert "| 500 / 600 (+20%) ±12% | 10 / 10.4 (+4%) |" in lines[2]
    assert "| mixed | on | 90 % |" in lines[3]
    assert "| 50 / 40 (-20%) | 0.05 |" in lines[3]
    assert "up to 65 % of the knee, TTFT p95: 0 of 1 within 15%, +20% to +20%" in lines
    assert "up to 65 % of the knee, tok/s: 1 of 1 within 15%, +0% to +0%" in lines


def test_comparisons_with_another_calibration_are_left_out(tmp_path: Path) -> None:
    path = kept(tmp_path / "kept.jsonl", cell(30, made="then"), cell(50), cell(65))
    assert [each.load for each in read(path)] == [50, 65]
    assert [each.load for each in read(path, "then")] == [30]
    assert read(tmp_path / "nothing") == []


def test_it_prints_what_is_kept(tmp_path: Path) -> None:
    path = kept(tmp_path / "kept.jsonl", cell(50))
    said = CliRunner().invoke(plan_accuracy.main, ["tiny", "--table", "--out", str(path)])
    assert said.exit_code == 0
    assert "| mixed | off | 50 % | 80 |" in said.output


def test_it_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, bool]] = []

    def add(_self: Any, workload: Any, load: int, *, drafts: bool) -> None:
        made.append((workload.name, load, drafts))
        if len(made) == 2:
            raise LocalrunError("the machine is on fire")

    monkeypatch.setattr(plan_accuracy, "model_and_settings", lambda _name: (None, None))
    monkeypatch.setattr(plan_accuracy, "calibration_of", lambda _model, _settings: SimpleNamespace(made_at="now"))
    monkeypatch.setattr(plan_accuracy.Comparisons, "add", add)
    path = kept(tmp_path / "kept.jsonl", cell(50))
    arguments = ["tiny", "--out", str(path), "--workloads", "mixed", "--loads", "50,90,110"]
    said = CliRunner().invoke(plan_accuracy.main, arguments)
    assert said.exit_code == 0, said.output
    assert made == [("mixed", 90, False), ("mixed", 110, False), ("mixed", 50, True), ("mixed", 90, True)]
    assert "the machine is on fire" in said.output
