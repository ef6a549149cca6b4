"""What all workloads have in common."""

from __future__ import annotations

import asyncio
import re
import time

import msgspec
import pytest

from localrun.bench.results import Options, RunResult, Target, Workload, better
from localrun.bench.session import INTERRUPTED
from localrun.bench.workloads import WORKLOADS
from localrun.errors import DaemonUnreachable
from tests.bench.conftest import FakeServer, Reply

UNIT = re.compile(r"_(s|per_s|ratio|count|bytes|streams|tokens|slowdown|share|of_bound)$")


def test_the_registry_names_each_workload_as_it_names_itself() -> None:
    assert {name: workload.name for name, workload in WORKLOADS.items()} == {name: name for name in WORKLOADS}
    assert set(WORKLOADS) == {
        "decode", "shared", "stall", "outgrow", "agent", "returning", "restart", "chat", "fairness", "overload",
        "edit", "list", "json", "prose",
    }  # fmt: skip


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_headlines_end_in_a_unit(workload: Workload) -> None:
    assert workload.headline
    assert all(UNIT.search(name) for name in workload.headline)


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("c8_decode_tokens_per_s", "higher"),
        ("round3_cached_tokens", "higher"),
        ("completion_ratio", "higher"),
        ("cold_ttft_p50_s", "lower"),
        ("rss_bytes", "lower"),
        ("burst_refused_count", "lower"),
        ("mouse_slowdown", "lower"),
    ],
)
def test_the_better_direction_follows_from_the_name(metric: str, direction: str) -> None:
    assert better(metric) == direction


def test_a_run_that_is_interrupted_has_what_was_finished(server: FakeServer) -> None:
    def reply_after_two(count: int) -> Reply:
        return Reply([(0.0, "x")] * count if len(server.asked) <= 3 else [(30.0, "x")])

    server.reply = lambda asked: reply_after_two(asked.body["max_tokens"])

    async def interrupted() -> RunResult:
        task = asyncio.ensure_future(WORKLOADS["decode"].run(server.target, Options(seed=1, streams=(1, 1, 8))))
        deadline_s = time.monotonic() + 10
        while len(server.asked) < 11 and time.monotonic() < deadline_s:  # noqa: ASYNC110 - the server is a thread
            await asyncio.sleep(0.01)
        task.cancel()
        return await task

    result = asyncio.run(interrupted())
    assert result.note == INTERRUPTED
    assert sum(record.is_complete for record in result.records) == 2
    assert "ttft_p50_s" in result.metrics
    assert result.metrics["completion_ratio"] == 1.0


def test_an_end_before_the_first_answer_is_a_result_too(server: FakeServer) -> None:
    server.reply = lambda _: Reply([(30.0, "x")])

    async def interrupted() -> RunResult:
        task = asyncio.ensure_future(WORKLOADS["shared"].run(server.target, Options(seed=1)))
        await asyncio.sleep(0.05)
        task.cancel()
        return await task

    result = asyncio.run(interrupted())
    assert (result.note, result.records) == (INTERRUPTED, [])


def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(DaemonUnreachable):
        asyncio.run(WORKLOADS["shared"].run(Target("none", "http://127.0.0.1:9", "m"), Options(seed=1)))


def test_a_result_survives_json(server: FakeServer) -> None:
    result = asyncio.run(WORKLOADS["decode"].run(server.target, Options(seed=7, streams=(2,))))
    read = msgspec.json.decode(msgspec.json.encode(result), type=RunResult)
    assert read == result
    assert read.parameters["seed"] == 7
    assert read.parameters["wording"] == "token ids"
    assert read.started_at.endswith("+00:00")
