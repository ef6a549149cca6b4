"""Split or one pool: the decision, and what a change keeps."""

from __future__ import annotations

import pytest

from localrun.engine.backend import MemoryKind
from localrun.engine.cache.kv_mode import LINGER_S, KvMode
from localrun.engine.cache.kv_pool import KvPool
from localrun.engine.cache.kv_store import KvStore
from localrun.engine.cache.pool import Pool
from localrun.engine.cache.state_pool import StatePool
from localrun.engine.cache.stream_pool import StreamPool
from localrun.engine.fake import FakeBackend
from tests.engine.harness import Harness, expected_output

SHARE = 256  # cells of each of the four streams
PROMPT = [number % 97 for number in range(100)]


def backend(*, n_slots: int = 4, kind: MemoryKind = MemoryKind.ATTENTION) -> FakeBackend:
    return FakeBackend(n_cells=4 * SHARE, n_seqs=6, n_batch=256, n_slots=n_slots, memory_kind=kind)


def mode(fake: FakeBackend) -> KvMode:
    now = iter(range(1 << 30))
    return KvMode(fake, KvStore(1 << 20), lambda: next(now) * 1e-6, lambda n_new: False)


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        (backend(), StreamPool),
        (backend(n_slots=0), KvPool),
        (backend(kind=MemoryKind.HYBRID), StatePool),
        (backend(kind=MemoryKind.WINDOW, n_slots=0), StatePool),
    ],
)
def test_the_pool_follows_from_what_the_backend_can(fake: FakeBackend, expected: type[Pool]):
    assert isinstance(mode(fake).pool, expected)


def test_a_request_that_outgrows_its_share_gets_one_pool():
    kv = mode(backend())
    assert kv.change(SHARE - 1, is_running=True, now_s=0.0) is None
    assert kv.change(SHARE, is_running=True, now_s=0.0) is False


def test_split_comes_back_when_nothing_runs_or_after_some_time():
    kv = mode(backend())
    assert kv.change(SHARE, is_running=True, now_s=5.0) is False
    kv.switch(split=False)
    assert kv.change(SHARE, is_running=True, now_s=6.0) is None
    assert kv.change(10, is_running=True, now_s=6.0 + LINGER_S - 0.1) is None
    assert kv.change(10, is_running=False, now_s=6.1) is True
    assert kv.change(10, is_running=True, now_s=6.0 + LINGER_S) is True


def test_a_backend_that_cannot_split_never_changes():
    kv = mode(backend(n_slots=0))
    assert kv.change(SHARE * 4, is_running=False, now_s=0.0) is None
    assert kv.change(1, is_running=False, now_s=100.0) is None


def compute(fake: FakeBackend, pool: Pool, tokens: list[int]) -> int:
    """Run a request's tokens and end it. Returns how many the cache gave."""
    lease = pool.acquire(tokens)
    assert lease is not None
    count = len(tokens) - lease.n_cached
    fake.batch.token[:count] = tokens[lease.n_cached :]
    fake.batch.pos[:count] = range(lease.n_cached, len(tokens))
    fake.batch.seq[:count] = lease.seq
    fake.decode(count)
    pool.cells.place([lease.seq] * count)
    pool.publish(lease.seq, tokens)
    assert fake.tokens_of(lease.seq) == tokens
    pool.release(lease.seq, tokens)
    pool.check_integrity()
    return lease.n_cached


def test_what_was_computed_before_a_change_is_there_after_it():
    fake = backend()
    kv = mode(fake)
    assert compute(fake, kv.pool, PROMPT) == 0
    kv.switch(split=False)
    assert isinstance(kv.pool, KvPool)
    assert (fake.is_split, fake.n_used, kv.pool.cells.n_cells) == (False, 0, 4 * SHARE)
    assert compute(fake, kv.pool, [*PROMPT, *range(200, 240)][:120]) == 100
    kv.switch(split=True)
    assert isinstance(kv.pool, StreamPool)
    assert (fake.is_split, kv.pool.cells.n_cells) == (True, SHARE)
    assert compute(fake, kv.pool, [*PROMPT, *range(200, 240)]) == 120


def rows_computed_twice(ram_cache_bytes: int) -> int:
    """By four requests of which one outgrows its share while the others run."""
    run = Harness(n_cells=4 * SHARE, n_slots=4, n_seqs=6, is_split=True, ram_cache_bytes=ram_cache_bytes)
    run.engine.pool.store.recompute_s = lambda start, n_tokens: n_tokens * 1e-3
    prompts = [[97 + index] * 100 for index in range(3)] + [[120] * 200]
    for index, prompt in enumerate(prompts):
        run.submit(index, prompt, n_predict=100)
    run.run()
    assert not run.backend.is_split or run.engine.totals.preemptions >= 4, "there was no change"
    for index, prompt in enumerate(prompts):
        assert run.tokens[index] == expected_output(prompt, 100)
    # The last token of an answer is never computed.
    return run.backend.n_rows_computed - sum(len(prompt) + 99 for prompt in prompts)


def test_what_the_store_has_room_for_is_not_computed_twice():
    assert rows_computed_twice(1 << 20) <= 4, "the last token of each is computed again, for its logits"
    n_all = rows_computed_twice(0)
    assert n_all > 400
    assert rows_computed_twice(1000) < n_all - 150
