"""`localrun bench` as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from localrun.bench.workloads import WORKLOADS
from localrun.cli import exits
from localrun.cli.arguments import NumberList
from localrun.cli.root import run
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
