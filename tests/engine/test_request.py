from __future__ import annotations

from localrun.engine.request import Request
from localrun.engine.sample.text import TextStream
from localrun.wire import Phase, Sampling, Usage
from tests.fakes.backend import FakeBackend


def request(n_prompt: int = 4) -> Request:
    sampler = FakeBackend(n_cells=256, n_seqs=2, n_batch=64).sampler(Sampling(), ignore_eos=True)
    return Request(1, [5] * n_prompt, n_prompt, 8, sampler, TextStream(()), arrived_at_s=10.0)


def test_the_phase_follows_from_what_is_computed():
    one = request()
    assert one.phase is Phase.QUEUED
    one.seq = 0
    assert (one.phase, one.n_pending) == (Phase.PREFILL, 4)
    one.n_computed = 3
    assert one.phase is Phase.PREFILL, "one token is pending, but it is the prompt's"
    one.n_computed = 4
    one.append(6, 11.0)
    assert (one.phase, one.n_pending, one.n_output) == (Phase.DECODE, 1, 1)
    one.n_computed = 0
    assert one.phase is Phase.PREFILL, "taken off its slot, it has to catch up"


def test_usage_splits_the_time_at_the_start_and_at_the_first_token():
    one = request()
    one.started_at_s, one.n_cached = 11.0, 2
    one.append(6, 13.0)
    one.append(6, 13.5)
    one.append(6, 14.0)
    assert one.usage(20.0) == Usage(4, 2, 3, queued_s=1.0, prefill_s=2.0, decode_s=1.0)


def test_a_request_that_never_started_was_queued_until_now():
    assert request().usage(12.5) == Usage(4, 0, 0, queued_s=2.5, prefill_s=0.0, decode_s=0.0)


def test_a_request_that_ends_in_its_prefill_has_spent_its_time_there():
    one = request()
    one.started_at_s = 11.0
    assert one.usage(15.0) == Usage(4, 0, 0, queued_s=1.0, prefill_s=4.0, decode_s=0.0)
