"""`localrun bench` as a user calls it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from localrun.bench.workloads import WORKLOADS
from localrun.cli import exits
from localrun.cli.arguments import NumberList
from localrun.cli.root import run
from localrun.models.synthesis.synthesize import synthesize
from tests.cli.conftest import Localrun
from tests.daemon import Daemon, running_daemon


def test_numbers_separated_by_commas() -> None:
    assert NumberList().convert("1,4, 8", None, None) == (1, 4, 8)
    assert NumberList().convert((2, 3), None, None) == (2, 3)


@pytest.mark.parametrize("text", ["", "1,x", "0", "1,,2", "-1", "1.5", "²"])
def test_what_is_no_such_list_is_said(text: str) -> None:
    with pytest.raises(click.BadParameter, match="1,4,8"):
        NumberList().convert(text, None, None)


@pytest.fixture(scope="module")
def bench_daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


def test_help_names_every_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == exits.OK
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in WORKLOADS)


def test_peer_is_a_command_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "peer", "--help"]) == exits.OK
    assert "bench peer" in capsys.readouterr().out.splitlines()[0]


def test_an_unknown_workload_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "decoed"]) == exits.USAGE
    error = capsys.readouterr().err
    assert "'decoed'" in error
    assert "overload" in error


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--seconds", "nan", "nan is not a number that can be reached"),
        ("--timeout", "inf", "inf is not a number that can be reached"),
        ("--json", "/no/such/folder/file.json", "there is no folder '/no/such/folder'"),
        ("--plot", "/no/such/folder/file.png", "there is no folder '/no/such/folder'"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], option: str, value: str, words: str
) -> None:
    assert run(["bench", "chat", option, value, "--url", "http://127.0.0.1:9"]) == exits.USAGE
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("streams", ["", "1,x", "0", "1,,2"])
def test_streams_are_a_list_of_numbers(streams: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "decode", "--streams", streams, "--url", "http://127.0.0.1:9"]) == exits.USAGE
    assert "1,4,8" in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "decode", "--url", "http://127.0.0.1:9"]) == exits.DAEMON_UNREACHABLE
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_the_running_daemon_is_measured_with_what_it_holds(
    bench_daemon: Daemon, program: Localrun, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    done = program(
        "bench", "decode", "returning", "--streams", "1,2", "--rounds", "2", "--json", str(out),
        "--price-per-hour", "3.6", port=bench_daemon.port,
    )  # fmt: skip
    assert done.returncode == exits.OK, done.stderr
    assert "c2_decode_tokens_per_s" in done.stdout
    assert "per million tokens" in done.stdout
    assert "model tiny" in done.stderr
    results = json.loads(out.read_text())["results"]
    assert [result["workload"] for result in results] == ["decode", "returning"] * 2
    assert all(result["metrics"]["completion_ratio"] == 1.0 for result in results)
    # 2048 cells, each conversation at most as long as the context: 3 * 2048 tokens in twelve.
    assert results[1]["parameters"]["n_conversations"] == 12
    assert results[1]["parameters"]["n_message"] < 3 * 2048 / 12 / 3
    assert len(results[0]["records"]) == 3
    assert results[0]["records"][0]["arrivals_s"]


def test_a_url_with_the_version_is_the_same_server(bench_daemon: Daemon, program: Localrun) -> None:
    done = program("bench", "decode", "--streams", "1", "--url", f"{bench_daemon.url}/v1/", "--verbose")
    assert done.returncode == exits.OK, done.stderr
    assert "c1_tpot_p99_s" in done.stdout


def test_without_a_daemon_it_starts_its_own_and_restarts_it(program: Localrun, unused_tcp_port: int) -> None:
    done = program("bench", "restart", "--model", "tiny", "--kv-cells", "4096", port=unused_tcp_port)
    assert done.returncode == exits.OK, done.stderr
    assert "restarted_ttft_s" in done.stdout
    assert "rss_bytes" in done.stdout
    assert "failed" not in done.stdout


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
