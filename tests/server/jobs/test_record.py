"""What a request's row says, from arrival to end."""

from __future__ import annotations

import pytest

from localrun import wire
from localrun.server.jobs.record import RequestRecord
from localrun.snapshot import RequestState


def _record() -> RequestRecord:
    return RequestRecord("req_1", "/api/chat", "editor", wire.Lane.INTERACTIVE, "asked-name", 100.0)


def _delta(n_output: int, n_tokens: int = 1, phase: wire.Phase = wire.Phase.DECODE) -> wire.Delta:
    return wire.Delta(1, phase, n_computed=10 + n_output, n_output=n_output, tokens=[7] * n_tokens)


def test_a_new_request_waits_for_its_model_and_invents_no_numbers() -> None:
    row = _record().row(102.0)
    assert row.state is RequestState.LOADING
    assert row.model == "asked-name"
    assert row.age_s == 2.0
    assert (row.prompt_tokens, row.cached_tokens, row.ttft_s, row.tokens_per_s, row.itl_p50_s) == (None,) * 5


def test_the_way_through_the_states() -> None:
    record = _record()
    record.loaded("tiny")
    assert record.row(101.0, queue_position=2).state is RequestState.QUEUED
    assert record.row(101.0, queue_position=2).queue_position == 2
    assert record.row(101.0, queue_position=2, predicted_wait_s=1.5).predicted_wait_s == 1.5
    record.started(wire.Started(id=1, slot=3, n_prompt=10, n_cached=4))
    row = record.row(101.0)
    assert (row.state, row.slot, row.prompt_tokens, row.cached_tokens, row.computed_tokens) == (
        RequestState.PREFILL, 3, 10, 4, 4,
    )  # fmt: skip
    record.progress(_delta(1), 103.0)
    assert record.row(103.0).state is RequestState.DECODE
    record.progress(wire.Delta(1, wire.Phase.QUEUED, n_computed=0, n_output=1), 104.0)
    assert (record.row(104.0).state, record.row(104.0).slot) == (RequestState.QUEUED, None)


def test_times_and_rates() -> None:
    record = _record()
    record.loaded("tiny")
    record.started(wire.Started(id=1, slot=0, n_prompt=10, n_cached=0))
    assert record.progress(_delta(1), 103.0) is None
    assert record.row(103.0).tokens_per_s is None
    for step in range(1, 11):
        assert record.progress(_delta(1 + step), 103.0 + step * 0.1) == pytest.approx(0.1)
    row = record.row(104.0)
    assert row.ttft_s == 3.0
    assert row.output_tokens == 11
    assert row.tokens_per_s == pytest.approx(10, rel=0.05)
    assert row.tokens_per_s_avg == pytest.approx(10)
    assert row.itl_p50_s == pytest.approx(0.1, rel=0.04)


def test_several_tokens_of_one_step_share_its_time() -> None:
    record = _record()
    record.progress(_delta(1), 101.0)
    assert record.progress(_delta(5, n_tokens=4), 102.0) == pytest.approx(0.25)


def test_the_end_takes_the_engines_counts_and_stops_the_clock() -> None:
    record = _record()
    record.loaded("tiny")
    record.progress(_delta(1), 101.0)
    record.usage = wire.Usage(n_prompt=10, n_cached=6, n_output=1, queued_s=0.1, prefill_s=0.2, decode_s=0.0)
    record.end(RequestState.DONE, 105.0, finish_reason="stop")
    row = record.row(200.0)
    assert (row.state, row.finish_reason, row.age_s) == (RequestState.DONE, "stop", 5.0)
    assert (row.prompt_tokens, row.cached_tokens, row.tokens_per_s) == (10, 6, None)
