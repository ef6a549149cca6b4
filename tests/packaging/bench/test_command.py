"""The comparison as a developer calls it, with a scripted llama-server; and greedy answers in company."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import divergence
from bench.servers import peer_server
from localrun.bench.servers import ServerFlags
from tests.daemon import running_daemon
from tests.support.synthesis.synthesize import synthesize

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests" / "bench" / "scripted_server.py"


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
    path = f"{ROOT}{os.pathsep}{ROOT / 'packaging'}"
    own = {
        "LOCALRUN_HOME": str(folder),
        "PYTHONPATH": path,
        "SCRIPT_CALLS": str(folder / "calls"),
    }
    command = [sys.executable, "-m", "bench", *map(str, arguments)]
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
    assert "status 4" in result.stderr
    assert "from another planet" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workloads", "decode,juggling"], "'juggling'"),
        (["--require", "shared faster"], "WORKLOAD:METRIC<=RATIO"),
        (["--watts", "60"], "go together"),
        (["--streams", "1,two"], "not a list such as 1,4,8"),
        (["--server", "/nowhere/llama-server"], "does not exist"),
        (["--latency", "soon"], "'soon' is not a latency"),
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


FLAGS = ServerFlags(model=Path("/models/some.gguf"), slots=8, kv_cells=32768, threads=2, latency="interactive")


def calls(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_llama_server_gets_the_same_slots_cells_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "llama-server"
    script.write_text(f"#!{sys.executable}\n" + SCRIPT.read_text())
    script.chmod(0o755)
    monkeypatch.setenv("SCRIPT_CALLS", str(tmp_path / "calls"))
    for is_unified in (False, True):
        with peer_server(script, FLAGS, tmp_path, is_unified=is_unified) as server:
            assert server.name == ("llama-server -kvu" if is_unified else "llama-server")
    split, unified = (call["arguments"] for call in calls(tmp_path))
    assert isinstance(split, list)
    assert isinstance(unified, list)
    expected = {"--model": "/models/some.gguf", "--host": "127.0.0.1", "--parallel": "8", "--ctx-size": "32768"}
    for name, value in (expected | {"--threads": "2", "--threads-batch": "2"}).items():
        assert split[split.index(name) + 1] == value
    assert set(split) - set(unified) - {split[-1]} == {"--no-kv-unified"}
    assert set(unified) - set(split) - {unified[-1]} == {"--kv-unified"}


def test_llama_server_speculates_only_where_it_is_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "llama-server"
    script.write_text(f"#!{sys.executable}\n" + SCRIPT.read_text())
    script.chmod(0o755)
    monkeypatch.setenv("SCRIPT_CALLS", str(tmp_path / "calls"))
    names = []
    for drafts in (False, True):
        with peer_server(script, FLAGS, tmp_path, is_unified=True, drafts=drafts) as server:
            names.append(server.name)
            assert not server.target.can_switch
    assert names == ["llama-server -kvu", "llama-server -kvu --spec-default"]
    assert ["--spec-default" in str(call["arguments"]) for call in calls(tmp_path)] == [False, True]


def test_a_greedy_answer_is_the_same_alone_and_among_seven_others() -> None:
    asked = divergence.prompts(24)
    assert len(set(asked)) == 24
    with running_daemon() as daemon:
        assert asyncio.run(divergence.differing(daemon.url, "tiny", asked)) == []
