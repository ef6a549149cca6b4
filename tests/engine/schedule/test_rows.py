"""Grants into the rows of a batch."""

from __future__ import annotations

from localrun.engine.backend import Batch
from localrun.engine.fake import FakeBackend
from localrun.engine.request import Request
from localrun.engine.sample.text import TextStream
from localrun.engine.schedule.scheduler import Grant, fill_batch
from localrun.wire import Sampling

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


def test_each_grant_is_a_run_of_rows_and_only_who_catches_up_wants_logits():
    batch = batch_of_seven_dirty_rows()
    part = Grant(request(4, [10, 11, 12, 13, 14], n_computed=1), 2)
    stream = Grant(request(0, [20, 21, 22], n_computed=2), 1)
    whole = Grant(request(2, [30, 31]), 2)
    assert fill_batch(batch, [part, stream, whole]) == [4, 4, 0, 2, 2]
    assert batch.token[:5].tolist() == [11, 12, 22, 30, 31]
    assert batch.pos[:5].tolist() == [1, 2, 2, 0, 1]
    assert batch.seq[:5].tolist() == [4, 4, 0, 2, 2]
    assert batch.wants_logits[:5].tolist() == [0, 0, 1, 0, 1]
    assert batch.token[5:].tolist() == [99, 99], "rows of nobody were written"


def test_rows_for_the_background_never_want_logits():
    batch = batch_of_seven_dirty_rows()
    assert fill_batch(batch, [Grant(request(3, [1, 2, 3]), 3)], wants_logits=False) == [3, 3, 3]
    assert batch.wants_logits[:3].tolist() == [0, 0, 0]
