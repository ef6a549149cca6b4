"""The decode curve, and chats in an open loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

from localrun.bench.results import Options
from localrun.bench.workloads.throughput import CHAT, DECODE
from tests.bench.conftest import Asked, FakeServer, Reply


def test_every_number_of_streams_has_its_own_rates(server: FakeServer) -> None:
    result = asyncio.run(DECODE.run(server.target, Options(seed=1, streams=(1, 3))))
    assert result.parameters["streams"] == [1, 3]
    assert [record.group for record in result.records] == ["c1", "c3", "c3", "c3"]
    assert all((record.n_prompt, record.n_output) == (50, 128) for record in result.records)
    for name in ("decode_tokens_per_s", "prefill_tokens_per_s", "request_p50_tokens_per_s", "itl_p99_s", "ttft_max_s"):
        assert f"c3_{name}" in result.metrics
    rates = [result.metrics["c1_decode_tokens_per_s"], result.metrics["c3_decode_tokens_per_s"]]
    assert result.metrics["plateau_decode_tokens_per_s"] == max(rates)
    assert result.metrics["completion_ratio"] == 1.0
    assert DECODE.shown(result.metrics)[:2] == ["c1_decode_tokens_per_s", "c3_decode_tokens_per_s"]


def test_no_two_streams_have_the_same_prompt(server: FakeServer) -> None:
    asyncio.run(DECODE.run(server.target, Options(seed=1, streams=(2, 4))))
    asyncio.run(DECODE.run(server.target, Options(seed=2, streams=(2, 4))))
    prompts = [tuple(asked.body["prompt"][:8]) for asked in server.asked if len(asked.body["prompt"]) == 50]
    assert len(prompts) == len(set(prompts)) == 12


def test_it_rises_until_more_streams_bring_no_more(server: FakeServer) -> None:
    turn = threading.Lock()

    def one_at_a_time(count: int) -> Iterator[tuple[float, str]]:
        for _ in range(count):
            with turn:
                time.sleep(0.001)
            yield 0.0, "x"

    server.reply = lambda asked: Reply(one_at_a_time(asked.body["max_tokens"]))
    result = asyncio.run(DECODE.run(server.target, Options(seed=1)))
    streams = result.parameters["streams"]
    assert isinstance(streams, list)
    assert streams == [2**index for index in range(len(streams))]
    # The sweep ends one step beyond the knee.
    assert result.metrics["knee_streams"] == streams[-2]


def test_one_stream_that_fails_does_not_end_the_run(server: FakeServer) -> None:
    n_asked = 0

    def reply(asked: Asked) -> Reply:
        nonlocal n_asked
        n_asked += 1
        pieces = [(0.0, "x")] * asked.body["max_tokens"]
        return Reply(pieces[:5], breaks=True) if n_asked == 3 else Reply(pieces)

    server.reply = reply
    result = asyncio.run(DECODE.run(server.target, Options(seed=1, streams=(4,))))
    assert result.metrics["completion_ratio"] == 0.75
    assert result.metrics["failed_count"] == 1
    assert result.metrics["c4_decode_tokens_per_s"] > 0
    assert [bool(record.problem) for record in result.records].count(True) == 1


# --- chat ---

OPTIONS = Options(seed=5, seconds=0.5, rate_per_s=40, ttft_limit_s=5.0, itl_limit_s=1.0)


def test_chats_come_at_their_times_and_are_judged_by_the_limits(server: FakeServer) -> None:
    result = asyncio.run(CHAT.run(server.target, OPTIONS))
    assert len(result.records) > 5
    assert result.metrics["goodput_ratio"] == result.metrics["completion_ratio"] == 1.0
    assert 0 < result.metrics["goodput_requests_per_s"] <= len(result.records) / 0.5
    first_s = min(record.intended_at_s for record in result.records)
    assert max(record.intended_at_s for record in result.records) - first_s < 0.5
    assert {50 <= record.n_prompt <= 350 and 16 <= record.n_output <= 112 for record in result.records} == {True}
    assert (result.parameters["rate_per_s"], result.parameters["ttft_limit_s"]) == (40, 5.0)


def test_a_server_that_is_slow_to_begin_has_no_goodput_but_completes(server: FakeServer) -> None:
    server.reply = lambda asked: Reply([(0.1, "x"), *[(0.0, "x")] * (asked.body["max_tokens"] - 1)])
    slow = Options(seed=5, seconds=0.5, rate_per_s=20, ttft_limit_s=0.05)
    result = asyncio.run(CHAT.run(server.target, slow))
    assert result.metrics["goodput_ratio"] == 0.0
    assert result.metrics["completion_ratio"] == 1.0


def test_a_server_that_handles_one_at_a_time_is_still_asked_at_the_set_times(server: FakeServer) -> None:
    server.reply = lambda _: Reply([(0.2, "x")])
    result = asyncio.run(CHAT.run(server.target, OPTIONS))
    sent = sorted(record.sent_at_s for record in result.records)
    # A closed loop would have sent at most three in this time.
    assert sum(at_s < sent[0] + 0.19 for at_s in sent) > 3


def test_no_arrival_in_a_short_time_is_said(server: FakeServer) -> None:
    result = asyncio.run(CHAT.run(server.target, Options(seed=5, seconds=0.001, rate_per_s=0.01)))
    assert result.records == []
    assert "--seconds" in result.note
