"""Grants into the rows of a batch."""

from __future__ import annotations

from localrun.engine.backend import Batch
from localrun.engine.request import Request
from localrun.engine.sample.text import TextStream
from localrun.engine.schedule.scheduler import Grant, StepPlan, StreamRows, fill_batch
from localrun.wire import Sampling
from tests.fakes.backend import FakeBackend

SAMPLER = FakeBackend(n_cells=256, n_seqs=2, n_batch=64).sampler(Sampling(), ignore_eos=True)


def request(seq: int, tokens: list[int], *, n_computed: int = 0) -> Request:
    one = Request(seq, tokens, len(tokens), 8, SAMPLER, TextStream(()))
    one.seq, one.n_computed = seq, n_computed
    return one


def batch_of_seven_dirty_rows() -> Batch:
    batch = Batch(7)
    batch.wants_logits[:] = 1
    batch.token[:] = batch.pos[:] = batch.seq[:] = 99
    return batch


def test_each_grant_is_a_run_of_rows_whose_last_one_wants_logits():
    batch = batch_of_seven_dirty_rows()
    part = Grant(request(4, [10, 11, 12, 13, 14], n_computed=1), 2)
    stream = Grant(request(0, [20, 21, 22], n_computed=2), 1)
    whole = Grant(request(2, [30, 31]), 2)
    assert fill_batch(batch, [part, stream, whole]) == [4, 4, 0, 2, 2]
    assert batch.token[:5].tolist() == [11, 12, 22, 30, 31]
    assert batch.pos[:5].tolist() == [1, 2, 2, 0, 1]
    assert batch.seq[:5].tolist() == [4, 4, 0, 2, 2]
    assert batch.wants_logits[:5].tolist() == [0, 1, 1, 0, 1]
    assert batch.token[5:].tolist() == [99, 99], "rows of nobody were written"


def streams(*requests: Request) -> StepPlan:
    return StepPlan(tuple(Grant(one, 1) for one in requests), 0, len(requests))


def test_rows_that_stay_have_the_next_token_and_position():
    batch, rows = batch_of_seven_dirty_rows(), StreamRows()
    first, second = request(1, [10, 11], n_computed=1), request(3, [20, 21, 22], n_computed=2)
    plan = streams(first, second)
    for step in range(3):
        assert rows.fill(batch, plan) == [1, 3]
        assert batch.token[:2].tolist() == [first.tokens[-1], second.tokens[-1]]
        assert batch.pos[:2].tolist() == [1 + step, 2 + step]
        assert batch.seq[:2].tolist() == [1, 3]
        assert batch.wants_logits[:2].tolist() == [1, 1]
        for one in (first, second):
            one.n_computed += 1
            one.append(40 + step, 0.0)


def test_rows_of_a_step_that_failed_are_the_same_once_more():
    batch, rows = batch_of_seven_dirty_rows(), StreamRows()
    plan = streams(request(1, [10, 11], n_computed=1))
    for _ in range(2):
        rows.fill(batch, plan)
        assert (batch.token[0], batch.pos[0]) == (11, 1)


def test_other_rows_in_between_or_another_batch_are_noticed():
    batch, rows = batch_of_seven_dirty_rows(), StreamRows()
    stream, other = request(1, [10, 11], n_computed=1), request(2, [30, 31, 32])
    plan = streams(stream)
    rows.fill(batch, plan)
    rows.fill(batch, StepPlan((Grant(other, 3),), 3, 0))
    assert rows.fill(batch, plan) == [1]
    assert (batch.seq[0], batch.wants_logits[0]) == (1, 1)
    anew = batch_of_seven_dirty_rows()
    rows.fill(anew, plan)
    assert (anew.seq[0], anew.token[0], anew.pos[0]) == (1, 11, 1)
