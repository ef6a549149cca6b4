"""The figures of the comparison with llama-server: condensed from what the bench wrote, and put into the pages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.machine import PACKAGING

sys.path.insert(0, str(PACKAGING))
import figures


def spread(median: float, lowest: float, highest: float, n_rounds: int = 3) -> dict[str, Any]:
    return {"median": median, "lowest": lowest, "highest": highest, "n_rounds": n_rounds}


def peer(workload: str, metric: str, ratio: dict[str, Any] | None, *, latency: str = "balanced") -> dict[str, Any]:
    """What `python -m bench --json` writes, as far as it is read here."""
    one = {
        "workload": workload, "metric": metric, "subject": spread(100, 90, 110), "opponent": "llama-server -kvu",
        "opponents": {"llama-server -kvu": spread(80, 70, 90), "llama-server": spread(50, 40, 60)}, "ratio": ratio,
    }  # fmt: skip
    return {
        "processor": "Some CPU", "rounds": 3, "comparisons": [one],
        "flags": {"model": "/somewhere/m.gguf", "slots": 8, "kv_cells": 8192, "threads": 2, "latency": latency},
        "environment": {"LOCALRUN_HOME": "/somewhere", "LOCALRUN_MAX_QUEUE": "3"},
        "runs": [{"result": {"started_at": "2031-05-04T10:00:00+00:00"}}, {"result": {"started_at": ""}}],
    }  # fmt: skip


def test_what_is_kept_names_no_folder_and_has_both_sides():
    kept = figures.condensed(peer("stall", "wall_s", spread(1.25, 1.1, 1.4)), "unknown", "")
    assert (kept.date, kept.processor, kept.model) == ("2031-05-04", "Some CPU", "m.gguf")
    assert kept.environment == {"LOCALRUN_MAX_QUEUE": "3"}
    ratio = kept.ratios["stall:wall_s"]
    assert (ratio.median, ratio.localrun, ratio.opponent, ratio.opponent_name) == (1.25, 100, 80, "llama-server -kvu")
    assert figures.condensed(peer("stall", "wall_s", None), "unknown", "").ratios == {}


def drafts(*, with_gain: bool) -> dict[str, Any]:
    made = peer("edit", "c4_tokens_per_s", spread(1.5, 1.2, 1.8))
    [rate] = made["comparisons"]
    rate["opponents"] |= {"llama-server --spec-default": spread(120, 100, 130)}
    rate["opponent"] = "llama-server --spec-default"
    if with_gain:
        shares = {"llama-server --spec-default": spread(0.4, 0.3, 0.5)}
        made["comparisons"] += [
            rate | {"metric": "c4_gain_ratio", "subject": spread(1.9, 1.8, 2.0), "opponents": {}, "ratio": None},
            rate | {"metric": "c4_acceptance_ratio", "subject": spread(0.8, 0.7, 0.9), "opponents": shares},
        ]
    return made


def test_what_drafts_gained_is_a_table_of_its_own():
    made = figures.Figures([figures.condensed(drafts(with_gain=True), "", "a machine")])
    bench = figures.tables(made)[figures.BENCH]
    assert "| m.gguf, edit, 4 | 1.90 (1.80 to 2.00) | 80% | 1.50 | 40% | 1.50 (1.20 to 1.80) |" in bench
    assert "Speculation" not in figures.tables(made)[figures.README]


def test_a_gain_that_was_not_measured_is_left_open():
    made = figures.Figures([figures.condensed(drafts(with_gain=False), "", "a machine")])
    assert "| m.gguf, edit, 4 | - | - | 1.50 | - | 1.50 (1.20 to 1.80) |" in figures.tables(made)[figures.BENCH]


def test_without_drafts_there_is_no_table_of_them():
    made = figures.Figures([figures.condensed(peer("stall", "wall_s", spread(1.0, 1.0, 1.0)), "", "")])
    assert made.measured[0].drafts == {}
    assert "Speculation" not in figures.tables(made)[figures.BENCH]


def test_the_last_file_counts_and_modes_are_kept_apart():
    files = [
        peer("stall", "wall_s", spread(1.0, 1.0, 1.0)),
        peer("stall", "wall_s", spread(2.0, 1.5, 2.5)),
        peer("stall", "wall_s", spread(9.0, 8.0, 10.0), latency="throughput"),
    ]
    made = figures.Figures([figures.condensed(each, "", "a machine") for each in files])
    bench = figures.tables(made)[figures.BENCH]
    assert "| stall, balanced: wall until all are done | 2.00 (1.50 to 2.50) |" in bench
    assert "| stall, throughput: wall until all are done | 9.00 (8.00 to 10.00) |" in bench
    performance = figures.tables(made)[figures.PERFORMANCE]
    assert "2.00 (1.50 to 2.50)" in performance
    assert "9.00" not in performance
    assert "| `interactive` | not measured | not measured |" in performance


def test_each_machine_has_its_own_conditions_and_earlier_figures_can_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("README", "BENCH", "PERFORMANCE"):
        (tmp_path / name).write_text(f"{figures.BEGIN}{figures.END}")
        monkeypatch.setattr(figures, name, tmp_path / name)
    monkeypatch.setattr(figures, "KEPT", tmp_path / "figures.json")
    for name, metric in (("a", "wall_s"), ("b", "long_ttft_s")):
        (tmp_path / f"{name}.json").write_text(json.dumps(peer("stall", metric, spread(0.5, 0.4, 0.6))))
        figures.main([str(tmp_path / f"{name}.json"), "--add", "--machine", f"machine {name}"])
    page = (tmp_path / "PERFORMANCE").read_text()
    assert page.count("0.50 (0.40 to 0.60)") == 3, "two rows, and one in the table of modes"
    assert all(f"Measured on machine {name}, " in page for name in "ab")
    figures.main([str(tmp_path / "b.json"), "--machine", "machine b"])
    assert "machine a" not in (tmp_path / "PERFORMANCE").read_text()


def test_one_round_is_called_one():
    made = figures.Figures([figures.condensed(peer("shared", "cold_wall_s", spread(0.5, 0.5, 0.5, 1)), "", "")])
    assert "| 0.50 (one round) |" in figures.tables(made)[figures.PERFORMANCE]


def test_the_readme_says_in_words_which_side_a_figure_favours():
    def said(metric: str, median: float) -> str:
        workload, _, name = metric.partition(":")
        made = figures.condensed(peer(workload, name, spread(median, median, median)), "", "")
        return " ".join(figures.tables(figures.Figures([made]))[figures.README].split())

    assert said("stall:longest_gap_s", 0.07).endswith("the answers that are running is 14 times shorter.")
    assert said("stall:long_ttft_s", 1.11).endswith("wait for its first token is 11 % longer.")
    assert said("decode:c1_decode_tokens_per_s", 0.86) == "- A lone answer is written 14 % slower."
    assert said("decode:c1_decode_tokens_per_s", 1.002) == "- A lone answer is written neither slower nor faster."
    assert said("decode:c8_decode_tokens_per_s", 2.5) == "- Eight answers at once are written 2.5 times faster."


def test_the_committed_figures_name_no_folder_of_anybody():
    assert "/" not in re.sub(r"localrun / llama-server", "", figures.KEPT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_a_page_has_the_kept_figures(page: Path):
    made = figures.tables(figures.kept())[page]
    assert re.search(r"\d\.\d\d|\d times|\d %", made)
    assert made in page.read_text(encoding="utf-8")


def test_the_script_reads_several_files(tmp_path: Path):
    for name, ratio in (("a", spread(0.5, 0.4, 0.6)), ("b", spread(0.7, 0.6, 0.8))):
        (tmp_path / f"{name}.json").write_text(json.dumps(peer("shared", "cold_wall_s", ratio)))
    program = (
        "import figures, sys; from pathlib import Path\n"
        "folder = Path(sys.argv[1])\n"
        "for name in ('README', 'BENCH', 'PERFORMANCE'):\n"
        "    path = folder / name; path.write_text(f'{figures.BEGIN}{figures.END}'); setattr(figures, name, path)\n"
        "figures.KEPT = folder / 'figures.json'\n"
        "figures.main([str(folder / 'a.json'), str(folder / 'b.json'), '--machine', 'a machine'])\n"
        "print(figures.PERFORMANCE.read_text())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=PACKAGING, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert "0.70 (0.60 to 0.80)" in ran.stdout
    assert "Measured on a machine, 2031-05-04" in ran.stdout
