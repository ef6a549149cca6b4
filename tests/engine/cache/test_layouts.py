"""Split or one pool: the decision, and what a change keeps."""

from __future__ import annotations

from localrun.engine.cache.cache import LINGER_S, Cache
from localrun.engine.cache.tiers import Tiers
from localrun.engine.cache.tree import Key
from localrun.engine.fake import FakeBackend
from tests.engine.harness import Harness, expected_output

SHARE = 256  # cells of each of the four streams
PROMPT = [number % 97 for number in range(100)]


def backend(*, n_slots: int = 4) -> FakeBackend:
    return FakeBackend(n_cells=4 * SHARE, n_seqs=6, n_batch=256, n_slots=n_slots)


def opened(fake: FakeBackend) -> Cache:
    now = iter(range(1 << 30))
    return Cache(fake, Tiers(1 << 20), lambda: next(now) * 1e-6)


def test_a_request_that_outgrows_its_share_gets_one_pool():
    kv = opened(backend())
    assert kv.fit(SHARE - 1, is_running=True, now_s=0.0) is None
    assert kv.fit(SHARE, is_running=True, now_s=0.0) is False


def test_split_comes_back_when_nothing_runs_or_after_some_time():
    kv = opened(backend())
    assert kv.fit(SHARE, is_running=True, now_s=5.0) is False
    kv.change(split=False)
    assert kv.fit(SHARE, is_running=True, now_s=6.0) is None
    assert kv.fit(10, is_running=True, now_s=6.0 + LINGER_S - 0.1) is None
    assert kv.fit(10, is_running=False, now_s=6.1) is True
    assert kv.fit(10, is_running=True, now_s=6.0 + LINGER_S) is True


def test_a_backend_that_cannot_split_never_changes():
    kv = opened(backend(n_slots=0))
    assert kv.fit(SHARE * 4, is_running=False, now_s=0.0) is None
    assert kv.fit(1, is_running=False, now_s=100.0) is None


def compute(fake: FakeBackend, pool: Cache, tokens: list[int]) -> int:
    """Run a request's tokens and end it. Returns how many the cache gave."""
    lease = pool.acquire(Key(tokens))
    assert lease is not None
    count = len(tokens) - lease.n_cached
    fake.batch.token[:count] = tokens[lease.n_cached :]
    fake.batch.pos[:count] = range(lease.n_cached, len(tokens))
    fake.batch.seq[:count] = lease.seq
    fake.decode(count)
    pool.cells.place([lease.seq] * count)
    pool.grow(lease.seq, len(tokens))
    assert fake.tokens_of(lease.seq) == tokens
    pool.release(lease.seq, len(tokens))
    pool.check_integrity()
    return lease.n_cached


def test_what_was_computed_before_a_change_is_there_after_it():
    fake = backend()
    kv = opened(fake)
    assert compute(fake, kv, PROMPT) == 0
    kv.change(split=False)
    assert (fake.is_split, fake.n_used, kv.cells.n_cells) == (False, 0, 4 * SHARE)
    assert compute(fake, kv, [*PROMPT, *range(200, 240)][:120]) == 100
    kv.change(split=True)
    assert (fake.is_split, kv.cells.n_cells) == (True, SHARE)
    assert compute(fake, kv, [*PROMPT, *range(200, 240)]) == 120


def rows_computed_twice(ram_cache_bytes: int) -> int:
    """By four requests of which one outgrows its share while the others run."""
    run = Harness(n_cells=4 * SHARE, n_slots=4, n_seqs=6, is_split=True, ram_cache_bytes=ram_cache_bytes)
    run.engine.cache.tiers.recompute_s = lambda start, n_tokens: n_tokens * 1e-3
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
