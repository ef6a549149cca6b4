"""A long prompt among running streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from localrun.bench.results import Options, RunResult
from localrun.bench.workloads.prompts import N_LONG, N_STREAM_OUTPUT, STALL, STEADY_PIECES
from tests.bench.conftest import Asked, FakeServer, Reply

PACE_S = 0.005
PREFILL_S = 0.3


def scripted(
    server: FakeServer,
    pieces: Callable[[threading.Event], Iterator[tuple[float, str]]],
    has_answered: threading.Event | None = None,
) -> RunResult:
    """Streams send `pieces`, told of an event that is set while the long prompt is computed; `has_answered` is set once
    its first token was sent."""
    is_computing = threading.Event()
    has_answered = has_answered or threading.Event()

    def compute() -> Iterator[tuple[float, str]]:
        is_computing.set()
        yield PREFILL_S, "x"
        is_computing.clear()
        has_answered.set()
        yield 0.0, "y"

    def reply(asked: Asked) -> Reply:
        if asked.body["max_tokens"] == 1:
            return Reply([(0.0, "x")])  # the question how to ask
        return Reply(compute() if len(asked.body["prompt"]) > 1000 else pieces(is_computing))

    server.reply = reply
    return asyncio.run(STALL.run(server.target, Options(seed=1)))


def test_the_silence_while_the_prompt_is_computed_is_found(server: FakeServer) -> None:
    has_answered = threading.Event()

    def standing_still(is_computing: threading.Event) -> Iterator[tuple[float, str]]:
        for n in range(N_STREAM_OUTPUT):
            if n == N_STREAM_OUTPUT // 2:
                has_answered.wait(60)  # however late a busy machine sends the long prompt and computes it
            yield (PREFILL_S if is_computing.is_set() else PACE_S), "x"

    result = scripted(server, standing_still, has_answered)
    # Of pieces that a busy machine reads late, the gap is shorter than the silence was.
    assert result.metrics["longest_gap_s"] > PREFILL_S / 2
    assert result.metrics["long_ttft_s"] >= PREFILL_S
    assert result.metrics["before_itl_p50_s"] < PREFILL_S / 2
    assert result.metrics["completion_ratio"] == 1.0
    assert result.note == ""
    streams = [record for record in result.records if record.group == "streams"]
    long = next(record for record in result.records if record.group == "long")
    assert long.n_prompt == N_LONG
    assert all(record.arrivals_s[STEADY_PIECES - 1] < long.sent_at_s for record in streams)
    assert result.metrics["wall_s"] == max(record.ended_at_s for record in result.records) - long.sent_at_s
    assert result.metrics["wall_s"] > result.metrics["long_ttft_s"]


def test_streams_that_go_on_have_no_such_gap(server: FakeServer) -> None:
    result = scripted(server, lambda _: iter([(PACE_S, "x")] * N_STREAM_OUTPUT))
    assert result.metrics["during_itl_p50_s"] < PREFILL_S / 2
    assert result.metrics["during_itl_p50_s"] == pytest.approx(result.metrics["before_itl_p50_s"], rel=3.0)


def test_a_stream_that_breaks_off_meanwhile_was_a_silence_too(server: FakeServer) -> None:
    def hanging(is_computing: threading.Event) -> Iterator[tuple[float, str]]:
        while not is_computing.is_set():
            yield PACE_S, "x"
        # After this the answer ends: nothing more ever comes.
        yield PREFILL_S / 2, ""

    result = scripted(server, hanging)
    assert "3 of the streams ended" in result.note


def test_a_long_prompt_that_fails_is_said(server: FakeServer) -> None:
    def reply(asked: Asked) -> Reply:
        is_long = len(asked.body["prompt"]) > 1000
        return Reply(status=400, message="too long") if is_long else Reply([(PACE_S, "x")] * asked.body["max_tokens"])

    server.reply = reply
    result = asyncio.run(STALL.run(server.target, Options(seed=1)))
    assert "too long" in result.note
    assert "longest_gap_s" not in result.metrics
    assert result.metrics["failed_count"] == 1


def test_a_small_context_makes_the_prompt_shorter(server: FakeServer) -> None:
    server.reply = lambda asked: Reply([(PACE_S, "x")] * min(100, asked.body["max_tokens"]))
    result = asyncio.run(STALL.run(server.target, Options(seed=1, context_tokens=1024)))
    n_long = result.parameters["n_long"]
    assert isinstance(n_long, int)
    assert n_long < 1024
    assert max(len(asked.body["prompt"]) for asked in server.asked) == n_long
