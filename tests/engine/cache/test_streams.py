"""Streams of their own: who starts where, what is copied, what is saved before it goes."""

from __future__ import annotations

from typing import Any

import pytest

from localrun.engine.cache.cache import Cache, SequenceLease
from localrun.engine.cache.tiers import GAIN_TOKENS, Tiers
from localrun.engine.cache.tree import PrefixKey
from localrun.engine.request import Request
from localrun.engine.sample.text import TextStream
from localrun.engine.schedule.background import BackgroundPrefill
from localrun.engine.schedule.budget import CostModel
from localrun.wire import Sampling
from tests.engine.harness import n_seqs_away
from tests.fakes.backend import FakeBackend

A, B, C, D = ([letter] * 60 for letter in b"abcd")
TAIL = list(b"and so on")
DIRECT_TOKENS = 64
LONG = [number % 97 for number in range(DIRECT_TOKENS + 60)]


class Bench:
    """A pool over the fake, and requests reduced to what the pool sees of them."""

    def __init__(self, *, n_slots: int = 3, n_background_seqs: int = 0, ram_cache_bytes: int = 1 << 20) -> None:
        self.backend = FakeBackend(
            n_cells=256 * n_slots, n_seqs=9, n_batch=256, n_slots=n_slots, n_background_seqs=n_background_seqs
        )
        self.background = BackgroundPrefill(lambda: self.backend.worker, CostModel())
        now = iter(range(1 << 30))
        self.cache = Cache(self.backend, Tiers(ram_cache_bytes), lambda: next(now) * 1e-6, self.takes)
        self.away: dict[int, Request] = {}

    def takes(self, n_new: int, depth: int = 0) -> bool:
        return self.background.takes(n_new, DIRECT_TOKENS)

    def acquire(self, tokens: list[int]) -> SequenceLease:
        lease = self.cache.acquire(PrefixKey(tokens))
        assert lease is not None
        if lease.seq >= self.backend.n_seqs:
            sampler = self.backend.sampler(Sampling(), ignore_eos=True)
            request = Request(0, tokens, len(tokens), 1, sampler, TextStream(()), seq=lease.seq)
            request.n_computed = lease.n_cached
            self.away[lease.seq] = request
            self.background.add(request)
        self.check()
        return lease

    def start(self, tokens: list[int]) -> tuple[int, int]:
        """Compute `tokens` in a sequence. Returns the sequence and how many of them the cache gave."""
        lease = self.acquire(tokens)
        assert self.backend.tokens_of(lease.seq) == tokens[: lease.n_cached]
        self.compute(lease.seq, tokens, lease.n_cached)
        return lease.seq, lease.n_cached

    def compute(self, seq: int, tokens: list[int], n_done: int) -> None:
        in_pool = seq in self.away
        batch, count = self.backend.worker.batch if in_pool else self.backend.batch, len(tokens) - n_done
        batch.token[:count] = tokens[n_done:]
        batch.pos[:count] = range(n_done, len(tokens))
        batch.seq[:count] = seq - batch.first_seq
        batch.wants_logits[:count] = 0
        if in_pool:
            worker = self.backend.worker
            worker.start(count)
            while not worker.is_over():
                pass
            worker.finish()
        else:
            self.backend.decode(count)
        self.cache.cells.place([seq] * count)
        self.cache.grow(seq, len(tokens))
        self.check()

    def park(self, tokens: list[int]) -> int:
        seq, _ = self.start(tokens)
        if seq in self.away:
            assert self.background.drop(self.away.pop(seq))
        self.cache.release(seq, len(tokens))
        self.check()
        return seq

    def save_next(self) -> None:
        while self.cache.can_save_next:
            self.cache.save_next()
            self.check()

    def stored(self, tokens: list[int]) -> int:
        return self.cache.tiers.match(PrefixKey(tokens), len(tokens)).saved().n_tokens

    def begin(self) -> None:
        """The background has something under way."""
        self.background.begin(None)
        assert self.background.is_busy

    def check(self) -> None:
        self.cache.check_integrity()
        for seq in range(self.backend.n_seqs + n_seqs_away(self.backend)):
            assert self.cache.cells.length(seq) == len(self.backend.cells_of(seq))


def test_a_parked_prefix_is_gone_on_with_where_it_is():
    bench = Bench()
    seq = bench.park(A)
    assert bench.start(A + TAIL) == (seq, 60)
    assert bench.backend.n_rows_computed == 60 + 9


def test_the_last_token_is_never_cached_and_what_matches_is_what_an_acquire_gives():
    bench = Bench()
    bench.park(A)
    assert [bench.cache.match(PrefixKey(tokens)) for tokens in (A, A + TAIL, B)] == [59, 60, 0]
    assert bench.start(A)[1] == 59


def test_the_tail_of_a_parked_prefix_is_saved_before_it_is_cut():
    bench = Bench()
    seq = bench.park(A + B)
    assert bench.start(A + C) == (seq, 60)
    assert bench.stored(A + B) == 120
    other, n_cached = bench.start(A + B + TAIL)
    assert other != seq
    assert n_cached == 120
    assert bench.backend.tokens_of(seq) == A + C


def test_what_runs_is_copied_as_far_as_it_was_computed():
    bench = Bench()
    first = bench.acquire(A + B)
    assert bench.cache.match(PrefixKey(A + TAIL)) == 0, "nothing is computed yet"
    bench.compute(first.seq, A + B, 0)
    second, n_cached = bench.start(A + TAIL)
    assert second != first.seq
    assert n_cached == 60
    assert bench.backend.tokens_of(first.seq) == A + B


@pytest.mark.parametrize("ram_cache_bytes", [0, 1 << 20])
def test_a_copy_from_a_running_one_needs_no_store(ram_cache_bytes: int):
    bench = Bench(ram_cache_bytes=ram_cache_bytes)
    bench.start(A + B)
    assert bench.start(A + TAIL)[1] == 60
    assert bench.stored(A) == (60 if ram_cache_bytes else 0), "the third one will want it, too"


def test_what_was_settled_comes_back_from_the_store_after_its_stream_was_taken():
    bench = Bench()
    bench.park(A)
    bench.save_next()
    for tokens in (B, C, D):
        bench.start(tokens)
    assert bench.cache.acquire(PrefixKey(A)) is None, "all streams run"
    bench.cache.release(0, len(B))
    assert bench.start(A + TAIL)[1] == 60


def test_who_takes_the_last_parked_stream_saves_what_is_in_it():
    bench = Bench(n_slots=2)
    bench.start(B)
    bench.park(A)
    bench.start(C)
    assert bench.stored(A) == 60


def test_the_prefix_parked_first_makes_way():
    bench = Bench(ram_cache_bytes=0)
    first, second, third = (bench.park(tokens) for tokens in (A, B, C))
    assert bench.start(D)[0] == first
    assert bench.start(B + TAIL) == (second, 60)
    assert bench.start(A)[0] == third


def test_a_little_in_common_is_not_worth_anything():
    bench = Bench()
    bench.park(A)
    assert bench.cache.match(PrefixKey(A[: GAIN_TOKENS - 1] + B)) == 0
    seq, n_cached = bench.start(A[: GAIN_TOKENS - 1] + B)
    assert (n_cached, bench.backend.tokens_of(seq)) == (0, A[: GAIN_TOKENS - 1] + B)


def test_following_pays_where_more_comes_than_is_there():
    bench = Bench()
    lease = bench.acquire(A + B)
    assert bench.cache.follow(lease.seq, PrefixKey(A + C), 0)
    assert not bench.cache.follow(lease.seq, PrefixKey(A + C), 60 - GAIN_TOKENS + 1)
    bench.compute(lease.seq, A + B, 0)
    assert not bench.cache.follow(lease.seq, PrefixKey(A + C), 0), "there is no more to come"


def test_a_rewound_sequence_promises_only_what_it_still_has():
    bench = Bench()
    seq, _ = bench.start(A + B)
    assert bench.cache.rewind(seq, 30) == 30
    bench.check()
    assert bench.cache.match(PrefixKey(A + C)) == 30


def test_a_forgotten_sequence_leaves_nothing():
    bench = Bench()
    seq, _ = bench.start(A)
    bench.cache.release(seq, 0)
    bench.check()
    assert (bench.cache.match(PrefixKey(A)), bench.backend.n_used, bench.cache.n_cached_sequences) == (0, 0, 0)
    other = bench.acquire(B)
    bench.cache.release(other.seq, len([]))
    bench.check()
    assert bench.cache.n_cached_sequences == 0


def test_settling_saves_one_at_a_time_and_leaves_it_where_it_is():
    bench = Bench()
    for tokens in (A, B):
        bench.park(tokens)
    for _ in ("begun", "read", "kept"):
        assert sorted(map(bench.stored, (A, B))) == [0, 0]
        bench.cache.save_next()
    assert sorted(map(bench.stored, (A, B))) == [0, 60]
    bench.save_next()
    assert (bench.stored(A), bench.stored(B), bench.cache.can_save_next) == (60, 60, False)
    assert bench.backend.n_used == 120
    bench.cache.save_next()


@pytest.mark.parametrize("n_steps", [1, 2])
def test_who_goes_on_in_a_stream_that_is_being_saved_waits_until_it_is_read(n_steps: int):
    """Its tail is cut off: what was read before that is kept."""
    bench = Bench()
    seq = bench.park(A + B)
    for _ in range(n_steps):
        bench.cache.save_next()
    assert bench.start(A + C) == (seq, 60)
    bench.save_next()
    assert bench.stored(A + B) == 120
    assert bench.backend.tokens_of(seq) == A + C


@pytest.mark.parametrize("n_steps", [1, 2])
def test_who_goes_on_behind_what_is_being_saved_may_move_at_once(n_steps: int):
    """What was not read yet is not read any more: the longer prompt is saved at its end."""
    bench = Bench()
    bench.start(B)
    seq = bench.park(A)
    for _ in range(n_steps):
        bench.cache.save_next()
    assert bench.start(A + TAIL) == (seq, 60)
    bench.cache.release(0, 0)
    assert bench.cache.compact() == (seq, 0)
    bench.save_next()
    assert bench.stored(A + TAIL) == (0 if n_steps == 1 else 60)
    bench.cache.release(0, len(A + TAIL))
    bench.save_next()
    assert bench.stored(A + TAIL) == 69 - (9 if n_steps == 2 else 0), "a few tokens more are not worth a save"


@pytest.mark.parametrize("n_steps", [1, 2])
def test_a_stream_that_is_taken_while_it_is_being_saved_is_saved_all_the_same(n_steps: int):
    bench = Bench(n_slots=2)
    bench.start(B)
    bench.park(A)
    for _ in range(n_steps):
        bench.cache.save_next()
    bench.start(C)
    bench.save_next()
    assert bench.stored(A) == 60


@pytest.mark.parametrize("n_steps", [1, 2])
def test_what_is_cleared_while_it_is_being_saved_does_not_come_back(n_steps: int):
    bench = Bench()
    bench.park(A)
    for _ in range(n_steps):
        bench.cache.save_next()
    bench.cache.clear(ram=True, disk=True)
    bench.check()
    bench.save_next()
    assert bench.stored(A) == 0
    assert not bench.cache.can_save_next


def test_retiring_waits_for_what_is_being_saved():
    bench = Bench()
    for tokens in (A, B):
        bench.park(tokens)
    bench.cache.save_next()
    bench.cache.retire()
    assert [bench.stored(tokens) for tokens in (A, B)] == [60, 60]


def test_without_a_store_prefixes_stay_in_their_streams_and_nothing_is_to_settle():
    bench = Bench(ram_cache_bytes=0)
    seq = bench.park(A)
    assert not bench.cache.can_save_next
    assert bench.start(A[:30] + B) == (seq, 30)
    bench.cache.retire()


def test_retiring_saves_everything_that_is_parked():
    bench = Bench(n_background_seqs=1)
    for tokens in (A, B, LONG):
        bench.park(tokens)
    bench.cache.retire()
    assert [bench.stored(tokens) for tokens in (A, B, LONG)] == [60, 60, len(LONG)]


def test_clearing_memory_empties_parked_streams_and_leaves_running_ones():
    bench = Bench()
    bench.park(A)
    bench.park(B)
    bench.save_next()
    seq, _ = bench.start(C)
    bench.cache.clear(ram=True, disk=False)
    bench.check()
    assert [bench.cache.match(PrefixKey(tokens)) for tokens in (A, B)] == [0, 0]
    assert bench.backend.tokens_of(seq) == C
    assert bench.backend.n_used == 60


def test_running_streams_are_kept_at_the_lowest_numbers():
    bench = Bench()
    for tokens in (A, B, C):
        bench.start(tokens)
    assert bench.cache.compact() is None
    bench.cache.release(0, len(A))
    assert bench.cache.compact() == (2, 0)
    bench.check()
    assert bench.backend.tokens_of(0) == C
    assert bench.stored(A) == 60, "what was parked in the hole is not lost"
    assert bench.cache.compact() is None
    bench.cache.release(0, 0)
    assert bench.cache.compact() == (1, 0)
    assert bench.backend.tokens_of(0) == B
    bench.check()


def test_a_move_that_the_backend_refuses_is_not_passed_over():
    bench = Bench()
    for tokens in (A, B):
        bench.start(tokens)
    bench.cache.release(0, 0)
    bench.backend.state_set = lambda seq, state: False  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="stream 0 refused"):
        bench.cache.compact()


def background_bench(**changed: Any) -> Bench:
    return Bench(**({"n_background_seqs": 2} | changed))


def test_a_long_way_to_go_begins_in_the_background_and_a_short_one_beside_the_streams():
    bench = background_bench()
    assert bench.acquire(LONG[:DIRECT_TOKENS]).seq == 0
    assert bench.acquire(LONG).seq == 3
    assert bench.acquire([*A, *A, *A]).seq == 4
    assert bench.acquire([*B, *B, *B]).seq == 1, "no place in the background is left"


def test_what_counts_is_what_is_left_to_compute():
    bench = background_bench()
    bench.park(LONG[:DIRECT_TOKENS])
    assert bench.acquire([*LONG[:DIRECT_TOKENS], *TAIL]).seq == 0


def test_a_long_prompt_takes_what_is_cached_with_it_into_the_background():
    bench = background_bench()
    bench.park(A)
    seq, n_cached = bench.start(A + LONG)
    assert bench.cache.check_integrity() is None
    assert (seq >= bench.backend.n_seqs, n_cached) == (True, 60)


def test_a_prompt_of_the_background_that_is_done_goes_on_among_the_streams():
    bench = background_bench()
    seq, _ = bench.start(LONG)
    assert seq == 3
    assert bench.cache.move_to_stream(seq) == 0
    bench.check()
    assert bench.backend.tokens_of(0) == LONG
    assert bench.backend.tokens_of(seq) == []
    bench.cache.release(0, len(LONG))
    assert bench.cache.match(PrefixKey([*LONG, 1])) == len(LONG)


def test_nobody_starts_in_the_background_while_it_computes():
    bench = background_bench()
    bench.acquire(LONG)
    bench.begin()
    assert bench.takes(len([*A, *A])), "so admission lets it wait"
    # Who was let in before, and finds the background busy, goes beside the streams.
    assert bench.acquire([*A, *A]).seq == 0


def test_while_the_background_computes_its_sequences_are_left_alone():
    bench = background_bench(n_slots=2)
    busy = bench.acquire([*A, *A]).seq
    parked = bench.park(LONG)
    assert parked != busy
    bench.begin()
    assert not bench.cache.can_save_next
    bench.cache.save_next()
    bench.cache.clear(ram=True, disk=True)
    assert bench.cache.match(PrefixKey([*LONG, 1])) == 0
    assert bench.start([*LONG[:GAIN_TOKENS], *TAIL])[1] == 0
    assert bench.background.halt() is not None
    bench.cache.rewind(busy, 0)
    bench.check()
    assert bench.cache.can_save_next
