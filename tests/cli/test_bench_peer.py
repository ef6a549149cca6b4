"""`localrun bench peer` with our daemon on a fake engine, and a scripted executable for llama-server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from localrun.models.synthesize import synthesize

SCRIPT = Path(__file__).parents[1] / "bench" / "scripted_server.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peer") / "tiny.gguf"
    synthesize("tiny", "Q4_0", path)
    return path


@pytest.fixture
def llama_server(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text(f"#!{sys.executable}\n{SCRIPT.read_text()}")
    path.chmod(0o755)
    return path


def peer(folder: Path, *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LOCALRUN_")}
    own = {"LOCALRUN_HOME": str(folder), "LOCALRUN_FAKE_ENGINE": "1", "SCRIPT_CALLS": str(folder / "calls")}
    command = [sys.executable, "-m", "localrun", "bench", "peer", *map(str, arguments)]
    return subprocess.run(command, env=inherited | own | environ, capture_output=True, text=True, timeout=120)


def test_both_sides_are_measured_compared_and_judged(tmp_path: Path, llama_server: Path, model: Path):
    result = peer(
        tmp_path, "--server", llama_server, "--model", model, "--workloads", "decode,restart", "--streams", "1,2",
        "--rounds", "2", "--slots", "2", "--kv-cells", "8192", "--threads", "1", "--seed", "5", "--bandwidth", "10",
        "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png", "--price-per-hour", "1",
        "--require", "restart:cold_ttft_s>=0", "--require", "restart:cold_ttft_s>=1000",
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    header = next(line for line in result.stdout.splitlines() if line.strip().startswith("metric"))
    assert re.split(r"\s{2,}", header.strip())[:4] == ["metric", "localrun", "llama-server", "llama-server -kvu"]
    for text in (
        "decode curve, tokens per second, llama-server -kvu",
        "restarted_ttft_s",
        "rss_bytes",
        "per million tokens",
        "of bound",
    ):
        assert text in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[-2:]] == ["met", "MISSED"]
    assert [line for line in result.stderr.splitlines() if line.startswith("round 2 restart, llama-server -kvu: ")]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "out.json").read_bytes())
    assert written["flags"]["model"] == str(model)
    assert written["bandwidth_bytes_per_s"] == 10e9
    names = ["localrun", "llama-server", "llama-server -kvu"]
    runs = [(run["result"]["workload"], run["round_index"], run["result"]["target"]["name"]) for run in written["runs"]]
    workloads = ("decode", "restart", "memory")
    assert runs == [(workload, at, name) for workload in workloads for at in (0, 1) for name in names]
    assert all(record["n_output"] for run in written["runs"] for record in run["result"]["records"])
    # Started once, and again in each round of `restart`.
    assert len((tmp_path / "calls").read_text().splitlines()) == 2 * (1 + 2)


def test_a_server_that_does_not_start_is_one_line_with_its_last_words(tmp_path: Path, llama_server: Path, model: Path):
    result = peer(
        tmp_path, "--server", llama_server, "--model", model, "--workloads", "decode", "--kv-cells", "1024",
        "--bandwidth", "10", SCRIPT_STATUS="4",
    )  # fmt: skip
    assert result.returncode == 1
    assert "error: llama-server ended at once, with status 4" in result.stderr
    assert "from another planet" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workloads", "decode,juggling"], "no workload 'juggling'; the workloads are decode, "),
        (["--require", "shared faster"], "WORKLOAD:METRIC<=RATIO"),
        (["--watts", "60"], "go together"),
        (["--streams", "1,two"], "not a list such as 1,4,8"),
        (["--server", "/nowhere/llama-server"], "does not exist"),
        (["--latency", "soon"], "'soon' is no latency"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_started(
    tmp_path: Path, llama_server: Path, arguments: list[str], said: str
):
    result = peer(tmp_path, "--server", llama_server, *arguments)
    assert result.returncode != 0
    assert said in result.stderr
    assert not (tmp_path / "calls").exists()


def test_a_server_is_built_when_none_is_given(tmp_path: Path):
    result = peer(tmp_path, "--workloads", "decode", PATH=str(tmp_path / "empty"))
    assert result.returncode == 1
    assert "needs cmake" in result.stderr or "C++ compiler" in result.stderr
