"""`localrun bench` as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun.bench.workloads import WORKLOADS
from localrun.cli import exits
from localrun.cli.root import run
from tests.cli.conftest import Localrun
from tests.daemon import Daemon, running_daemon


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


@pytest.mark.parametrize("streams", ["", "1,x", "0", "1,,2"])
def test_streams_are_a_list_of_numbers(streams: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "decode", "--streams", streams, "--url", "http://127.0.0.1:9"]) == exits.USAGE
    assert "1,4,8" in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "decode", "--url", "http://127.0.0.1:9"]) == exits.DAEMON_UNREACHABLE
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_the_running_daemon_is_measured_with_what_it_holds(
    bench_daemon: Daemon, localrun: Localrun, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    done = localrun(
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


def test_a_url_with_the_version_is_the_same_server(bench_daemon: Daemon, localrun: Localrun) -> None:
    done = localrun("bench", "decode", "--streams", "1", "--url", f"{bench_daemon.url}/v1/", "--verbose")
    assert done.returncode == exits.OK, done.stderr
    assert "c1_tpot_p99_s" in done.stdout


def test_without_a_daemon_it_starts_its_own_and_restarts_it(localrun: Localrun, unused_tcp_port: int) -> None:
    done = localrun("bench", "restart", "--model", "tiny", "--kv-cells", "4096", port=unused_tcp_port)
    assert done.returncode == exits.OK, done.stderr
    assert "restarted_ttft_s" in done.stdout
    assert "rss_bytes" in done.stdout
    assert "failed" not in done.stdout
