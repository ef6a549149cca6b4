"""Chats in an open loop."""

from __future__ import annotations

import asyncio

from localrun.bench.results import Options
from localrun.bench.workloads.chat import WORKLOAD
from tests.bench.conftest import FakeServer, Reply

OPTIONS = Options(seed=5, seconds=0.5, rate_per_s=40, ttft_limit_s=5.0, itl_limit_s=1.0)


def test_chats_come_at_their_times_and_are_judged_by_the_limits(server: FakeServer) -> None:
    result = asyncio.run(WORKLOAD.run(server.target, OPTIONS))
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
    result = asyncio.run(WORKLOAD.run(server.target, slow))
    assert result.metrics["goodput_ratio"] == 0.0
    assert result.metrics["completion_ratio"] == 1.0


def test_a_server_that_handles_one_at_a_time_is_still_asked_at_the_set_times(server: FakeServer) -> None:
    server.reply = lambda _: Reply([(0.2, "x")])
    result = asyncio.run(WORKLOAD.run(server.target, OPTIONS))
    sent = sorted(record.sent_at_s for record in result.records)
    # A closed loop would have sent at most three in this time.
    assert sum(at_s < sent[0] + 0.19 for at_s in sent) > 3


def test_no_arrival_in_a_short_time_is_said(server: FakeServer) -> None:
    result = asyncio.run(WORKLOAD.run(server.target, Options(seed=5, seconds=0.001, rate_per_s=0.01)))
    assert result.records == []
    assert "--seconds" in result.note
