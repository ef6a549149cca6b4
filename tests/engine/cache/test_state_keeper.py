"""What is saved of a sequence and what comes back, on the fake backend."""

from __future__ import annotations

from localrun.engine.cache.kv_store import KvStore
from localrun.engine.cache.state_keeper import GAIN_TOKENS, SEGMENT_TOKENS, StateKeeper
from localrun.engine.fake import FakeBackend
from tests.engine.memory_disk import MemoryDisk

SYSTEM = [number % 251 for number in range(2 * SEGMENT_TOKENS)]
ONE, OTHER = [1] * 200, [2] * 200


class Backend(FakeBackend):
    """Notes which ranges were saved."""

    def __init__(self) -> None:
        super().__init__(n_cells=8192, n_seqs=4, n_batch=2048)
        self.saved: list[tuple[int, int]] = []

    def state_slices(self, seq, ranges):
        self.saved += ranges
        return super().state_slices(seq, ranges)


class Bench:
    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        self.now_s, self.tick_s = 0.0, 1e-6
        self.backend = Backend()
        self.store = KvStore(limit_bytes)
        self.keeper = StateKeeper(self.backend, self.store, self.clock)

    def clock(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def compute(self, seq: int, tokens: list[int]) -> None:
        self.backend.seq_remove(seq, 0)
        batch, count = self.backend.batch, len(tokens)
        batch.token[:count], batch.pos[:count], batch.seq[:count] = tokens, range(count), seq
        self.backend.decode(count)

    def save(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Compute and save. Returns the ranges that were taken from the backend."""
        self.compute(0, tokens)
        self.backend.saved = []
        assert self.keeper.save(0, tokens)
        self.store.check_integrity()
        return self.backend.saved

    def restore(self, tokens: list[int]) -> int:
        self.backend.seq_remove(1, 0)
        n_tokens = self.keeper.restore(1, self.store.match(tokens, len(tokens)))
        self.store.check_integrity()
        assert self.backend.tokens_of(1) == tokens[:n_tokens]
        return n_tokens


def test_a_prompt_is_saved_in_segments_and_comes_back_as_it_was():
    bench = Bench()
    tokens = SYSTEM + ONE
    assert bench.save(tokens) == [(0, 256), (256, 512), (512, 712)]
    assert bench.restore(tokens) == 712
    assert bench.restore([*tokens, 7, 7]) == 712


def test_only_what_is_new_is_saved_and_what_is_shared_is_there_once():
    bench = Bench()
    bench.save(SYSTEM + ONE)
    assert bench.save(SYSTEM + ONE) == []
    assert bench.save(SYSTEM + OTHER) == [(512, 712)]
    assert bench.save(SYSTEM + ONE + OTHER) == [(712, 912)]
    assert sum(len(segment.tokens) for segment in bench.store._tree.segments.values()) == 512 + 3 * 200
    assert [bench.restore(SYSTEM + tail) for tail in (ONE + OTHER, OTHER)] == [912, 712]


def test_a_branch_inside_a_segment_is_cut_where_it_parts_and_brings_only_what_is_common():
    bench = Bench()
    bench.save(SYSTEM)
    assert bench.save(SYSTEM[:300] + ONE) == [(300, 500)]
    assert bench.restore(SYSTEM[:300] + ONE) == 500
    assert bench.restore(SYSTEM[:100] + OTHER) == 100


def test_a_conversation_that_grows_by_little_is_not_a_chain_of_crumbs():
    bench = Bench()
    for length in range(300, 600, 20):
        bench.save((SYSTEM + ONE)[:length])
    assert len(bench.store) <= 5
    assert bench.restore((SYSTEM + ONE)[:580]) == 580


def test_a_crumb_that_others_go_on_from_is_left_where_it_is():
    bench = Bench()
    bench.save(SYSTEM[:50])
    bench.save(SYSTEM[:40] + OTHER)
    assert bench.save(SYSTEM[:50] + ONE) == [(50, 250)]
    assert bench.restore(SYSTEM[:40] + OTHER) == 240


def test_a_few_tokens_more_are_not_worth_a_save_but_the_first_few_are():
    bench = Bench()
    assert bench.save(SYSTEM[:5]) == [(0, 5)]
    bench.save(SYSTEM[:256])
    assert bench.save(SYSTEM[: 256 + GAIN_TOKENS - 1]) == []
    assert bench.save(SYSTEM[: 256 + GAIN_TOKENS]) == [(256, 256 + GAIN_TOKENS)]


def test_of_a_prompt_too_large_for_memory_the_beginning_is_saved():
    # The fake's positions take more than that where their numbers are larger.
    bench = Bench(limit_bytes=300 * FakeBackend.state_token_bytes)
    bench.compute(0, SYSTEM)
    assert not bench.keeper.save(0, SYSTEM)
    bench.store.check_integrity()
    assert bench.backend.saved == [(0, 256), (256, 300)]


def test_nothing_is_copied_where_nothing_can_be_kept():
    bench = Bench(limit_bytes=(GAIN_TOKENS - 1) * FakeBackend.state_token_bytes)
    bench.compute(0, SYSTEM)
    assert not bench.keeper.save(0, SYSTEM)
    assert bench.backend.saved == []


def test_with_a_disk_the_size_of_memory_bounds_nothing():
    bench = Bench(limit_bytes=1500)
    bench.store = KvStore(1500, MemoryDisk())
    bench.keeper = StateKeeper(bench.backend, bench.store, bench.clock)
    bench.compute(0, SYSTEM)
    assert bench.keeper.save(0, SYSTEM)
    bench.store.check_integrity()
    assert bench.restore(SYSTEM) == 512


def test_a_segment_that_vanished_ends_what_comes_back():
    bench = Bench()
    tokens = SYSTEM + ONE
    bench.save(tokens)
    path = bench.store.match(tokens, len(tokens))
    for gone, n_left in ((path.segments[1], 256), (path.segments[0], 0)):
        bench.store.drop(gone)
        assert bench.keeper.restore(2, path) == n_left
        assert bench.backend.tokens_of(2) == tokens[:n_left]
        bench.backend.seq_remove(2, 0)
        assert bench.restore(tokens) == n_left


def test_a_state_that_the_backend_refuses_is_a_miss_and_is_thrown_away():
    bench = Bench()
    bench.save(SYSTEM)
    bench.backend.state_set = lambda seq, state: False  # type: ignore[method-assign]
    assert bench.restore(SYSTEM) == 0
    assert len(bench.store) == 0


def test_a_copy_gives_the_beginning_to_an_empty_sequence():
    bench = Bench()
    bench.compute(0, ONE + OTHER)
    assert bench.keeper.copy(0, 3, 250)
    assert bench.backend.tokens_of(3) == (ONE + OTHER)[:250]


def test_saving_is_worth_it_where_copies_are_faster_than_computing():
    bench = Bench()
    assert bench.keeper.is_worth_saving(SYSTEM)
    assert not bench.keeper.is_worth_saving(SYSTEM[: GAIN_TOKENS - 1])
    bench.tick_s = 2.0
    bench.save(SYSTEM)
    assert not bench.keeper.is_worth_saving(SYSTEM), "a save takes 4 ms a token, computing 1"
    assert not Bench(limit_bytes=0).keeper.is_worth_saving(SYSTEM)
