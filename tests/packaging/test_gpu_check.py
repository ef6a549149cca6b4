"""`make gpu-check`: what it says without a card, and what it makes of what it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.says import says
from tests.script_module import module_of

SCRIPT = Path(__file__).parents[2] / "packaging" / "gpu_check.py"
LINE = "NVIDIA GeForce RTX 4090, 560.35.03, 24564, 500, 8.9"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs programs with a #! line")


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    return module_of(SCRIPT)


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """With a PATH that holds what lies in `folder`."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(folder / "out"), *arguments],
        capture_output=True, text=True, check=False, timeout=120, env=os.environ | {"PATH": str(folder)},
    )  # fmt: skip
    return ended, json.loads((folder / "out" / "gpu-check.json").read_text())


def nvidia_smi(folder: Path, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_without_a_card_it_says_that_it_was_not_run(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gpu-check.png").touch()  # of an earlier run
    ended, report = run(tmp_path)
    assert ended.returncode == 0
    assert ended.stdout.startswith("gpu-check: NOT RUN")
    assert report["ran"] is False
    assert "nvidia-smi" in report["reason"]
    assert not (tmp_path / "out" / "gpu-check.png").exists()


def test_a_driver_that_finds_no_card_is_quoted(tmp_path: Path):
    nvidia_smi(tmp_path, "echo 'Failed to initialize NVML' >&2; exit 9")
    ended, report = run(tmp_path)
    assert ended.returncode == 0
    assert report["ran"] is False
    assert says(report["reason"], "nvidia-smi", "Failed to initialize NVML")


def test_a_build_that_cannot_use_the_card_fails_before_anything_is_measured(tmp_path: Path):
    nvidia_smi(tmp_path, f"echo '{LINE}'")
    ended, report = run(tmp_path, "--built", "--skip-tests", "--shapes", "tiny")
    if report["build"]["devices"]:
        pytest.skip("this environment's llama.cpp has a GPU")
    assert ended.returncode == 1
    assert "no GPU" in ended.stdout
    assert report["problems"]
    assert report["card"]["name"] == "NVIDIA GeForce RTX 4090"
    assert not (tmp_path / "out" / "gpu-check.png").exists()


def test_the_card_decides_what_is_built(gpu_check):
    card = gpu_check.parse_card(LINE)
    assert (card.driver, card.total_bytes, card.used_bytes) == ("560.35.03", 24564 * 1024**2, 500 * 1024**2)
    assert card.compute_capability == "8.9"


@pytest.mark.parametrize(
    ("clock_mhz", "bus_bits", "data_sheet_gb_per_s"),
    [(10_501, 384, 1008), (2_619, 5_120, 3352), (9_501, 192, 456)],
)
def test_the_bandwidth_is_that_of_the_data_sheets(gpu_check, clock_mhz, bus_bits, data_sheet_gb_per_s):
    assert gpu_check.memory_bandwidth(clock_mhz, bus_bits) / 1e9 == pytest.approx(data_sheet_gb_per_s, rel=0.001)


def point(streams: int, rate: float, bound: float | None) -> dict[str, Any]:
    return {
        "streams": streams, "tokens_per_s": rate, "request_tokens_per_s": rate / streams, "prefill_tokens_per_s": 9.0,
        "bound_tokens_per_s": bound,
    }  # fmt: skip


def test_the_share_of_the_bandwidth_is_the_share_of_the_bound(gpu_check):
    outcome = {
        "curves": {"localrun": [point(1, 60.0, 100.0), point(2, 150.0, 200.0)]},
        "results": [{"workload": "decode", "note": "", "metrics": {"x": 1.0}, "records": []}],
    }
    made = gpu_check.summary(outcome, status=0, used_bytes=900, weights_bytes=1000, bandwidth=1e12)
    assert made["problems"] == []
    assert [each["bandwidth_share"] for each in made["decode"]] == [0.6, 0.75]
    assert [each["bandwidth_bytes_per_s"] for each in made["decode"]] == [6e11, 7.5e11]
    assert made["workloads"] == {"decode": {"note": "", "metrics": {"x": 1.0}}}


def test_what_did_not_lie_on_the_card_does_not_pass(gpu_check):
    outcome = {"curves": {"localrun": [point(1, 60.0, 100.0)]}, "results": []}
    made = gpu_check.summary(outcome, status=0, used_bytes=400, weights_bytes=1000, bandwidth=1e12)
    assert [problem.rpartition(": ")[2] for problem in made["problems"]] == ["it lay elsewhere"]
    empty = gpu_check.summary({"curves": {}, "results": []}, status=3, used_bytes=0, weights_bytes=1000, bandwidth=1e12)
    assert len(empty["problems"]) == 3


@pytest.mark.slow
def test_a_model_goes_through_the_bench_into_the_json_and_the_picture(gpu_check, tmp_path: Path):
    card = gpu_check.parse_card(LINE)
    made = gpu_check.bench("tiny", card, 1e10, (1, 2), ("decode",))
    assert [each["streams"] for each in made["decode"]] == [1, 2]
    assert all(each["tokens_per_s"] > 0 for each in made["decode"])
    assert made["workloads"]["decode"]["metrics"]["c2_decode_tokens_per_s"] > 0
    report = {"card": card._asdict(), "bandwidth_bytes_per_s": 1e10, "models": {"tiny": made}}
    gpu_check.draw(tmp_path / "gpu-check.png", report)
    assert (tmp_path / "gpu-check.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(report))
