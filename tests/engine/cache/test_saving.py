"""What is saved of a sequence and what comes back, on the fake backend."""

from __future__ import annotations

from localrun.engine.backend import State
from localrun.engine.cache.cache import Cache
from localrun.engine.cache.cells import OnePool
from localrun.engine.cache.copies import BLOCK_TOKENS, PIECE_TOKENS, Checkpoints, Copies
from localrun.engine.cache.tiers import GAIN_TOKENS, Tiers
from localrun.engine.cache.tree import DiskRecord, PrefixKey
from tests.engine.memory_disk import MemoryDisk
from tests.fakes.backend import FakeBackend

SYSTEM = [number % 251 for number in range(2 * BLOCK_TOKENS)]
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
    """Sequence 3 holds what is saved, sequence 1 what is restored; 0 is the spare one that copies pass through."""

    def __init__(self, limit_bytes: int = 1 << 20, disk: MemoryDisk | None = None) -> None:
        self.now_s, self.tick_s = 0.0, 1e-6
        self.backend = Backend()
        self.store = Tiers(limit_bytes, disk)
        self.cache = Cache(self.backend, self.store, self.clock)
        self.layout = OnePool(self.backend)
        checkpoints = Checkpoints(self.store, self.backend.message_ends)
        self.copies = Copies(self.backend, self.layout, self.store, checkpoints, {}, self.clock)

    def clock(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def compute(self, tokens: list[int]) -> None:
        self.backend.seq_remove(3, 0)
        batch, count = self.backend.batch, len(tokens)
        batch.token[:count], batch.pos[:count], batch.seq[:count] = tokens, range(count), 3
        self.backend.decode(count)

    def save(self, tokens: list[int]) -> list[tuple[int, int]]:
        """Compute and save. Returns the ranges that were taken from the backend."""
        self.compute(tokens)
        self.backend.saved = []
        assert self.save_all(tokens)
        self.store.check_integrity()
        return self.backend.saved

    def save_all(self, tokens: list[int]) -> bool:
        while (is_saved := self.copies.save(3, PrefixKey(tokens), len(tokens), spare=0)) is None:
            pass
        return is_saved

    def restore(self, tokens: list[int]) -> int:
        self.layout.cut(1, 0)
        n_tokens = self.copies.restore(1, PrefixKey(tokens), len(tokens), spare=0)
        self.store.check_integrity()
        assert self.backend.tokens_of(1) == tokens[:n_tokens]
        return n_tokens

    def saved(self, tokens: list[int]):
        return self.store.match(PrefixKey(tokens), len(tokens)).saved()


def test_a_prompt_is_saved_in_blocks_and_comes_back_as_it_was():
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
    assert sum(block.n_tokens for block in bench.store.tree.blocks.values()) == 512 + 3 * 200
    assert [bench.restore(SYSTEM + tail) for tail in (ONE + OTHER, OTHER)] == [912, 712]


def test_a_branch_inside_a_block_is_cut_where_it_parts_and_brings_only_what_is_common():
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
    bench.compute(SYSTEM)
    assert not bench.save_all(SYSTEM)
    bench.store.check_integrity()
    assert bench.backend.saved == [(0, 256), (256, 300)]


def test_nothing_is_copied_where_nothing_can_be_kept():
    bench = Bench(limit_bytes=(GAIN_TOKENS - 1) * FakeBackend.state_token_bytes)
    bench.compute(SYSTEM)
    assert not bench.save_all(SYSTEM)
    assert bench.backend.saved == []


def test_with_a_disk_the_size_of_memory_bounds_nothing():
    bench = Bench(limit_bytes=1500, disk=MemoryDisk())
    bench.compute(SYSTEM)
    assert bench.save_all(SYSTEM)
    bench.store.check_integrity()
    assert bench.restore(SYSTEM) == 512


def test_a_block_that_vanished_ends_what_comes_back():
    bench = Bench()
    tokens = SYSTEM + ONE
    bench.save(tokens)
    for gone, n_left in ((1, 256), (0, 0)):
        bench.store.drop(bench.saved(tokens).blocks[gone])
        assert bench.restore(tokens) == n_left
    disk = MemoryDisk()
    bench = Bench(limit_bytes=0, disk=disk)
    bench.save(tokens)
    for gone, n_left in ((1, 256), (0, 0)):
        del disk.data[bench.saved(tokens).blocks[gone].name]
        assert bench.saved(tokens).n_tokens > n_left, "nobody knows of it yet"
        assert bench.restore(tokens) == n_left


def test_a_state_that_the_backend_refuses_is_a_miss_and_is_thrown_away():
    bench = Bench()
    bench.save(SYSTEM)
    bench.backend.state_set = lambda seq, state: False  # type: ignore[method-assign]
    assert bench.restore(SYSTEM) == 0
    assert len(bench.store) == 0


def test_saving_is_worth_it_where_copies_are_faster_than_computing():
    bench = Bench()
    assert bench.store.is_worth_saving(len(SYSTEM))
    assert not bench.store.is_worth_saving(GAIN_TOKENS - 1)
    bench.tick_s = 2.0
    bench.save(SYSTEM)
    assert not bench.store.is_worth_saving(len(SYSTEM)), "a save takes 4 ms a token, computing 1"
    assert not Bench(limit_bytes=0).store.is_worth_saving(len(SYSTEM))


def test_one_slow_copy_does_not_rule_out_all_later_ones():
    bench = Bench()
    bench.tick_s = 2.0
    bench.save(SYSTEM)
    bench.tick_s = 1e-6
    assert not bench.store.is_worth_saving(len(OTHER))
    n_passed_over = 0
    while not bench.saved(OTHER).n_tokens:
        park(bench, OTHER)
        bench.cache.retire()
        n_passed_over += 1
        assert n_passed_over < 50
    assert n_passed_over > 1


def park(bench: Bench, tokens: list[int]) -> None:
    """A request for `tokens` comes and ends."""
    lease = bench.cache.acquire(PrefixKey(tokens))
    assert lease is not None
    batch = bench.backend.batch
    for at in range(lease.n_cached, len(tokens), batch.capacity):
        count = len(tokens[at : at + batch.capacity])
        batch.token[:count], batch.pos[:count] = tokens[at : at + count], range(at, at + count)
        batch.seq[:count] = lease.seq
        bench.backend.decode(count)
        bench.cache.cells.place([lease.seq] * count)
    bench.cache.release(lease.seq, len(tokens))


class Sizes(Backend):
    """Notes how many tokens the sequences had that were exported."""

    def __init__(self) -> None:
        super().__init__()
        self.exported: list[int] = []

    def state_slices(self, seq, ranges):
        self.exported.append(len(self.tokens_of(seq)))
        return super().state_slices(seq, ranges)


def test_a_long_conversation_is_saved_a_piece_at_a_time_and_its_growth_costs_what_is_new():
    bench = Bench()
    bench.backend = Sizes()
    bench.cache = Cache(bench.backend, bench.store, bench.clock)
    chat = [number % 241 for number in range(5 * PIECE_TOKENS + 100)]
    park(bench, chat)
    n_steps = 0
    while bench.cache.can_save_next:
        bench.cache.save_next()
        bench.cache.check_integrity()
        n_steps += 1
    assert n_steps == 6
    assert bench.backend.exported == [PIECE_TOKENS] * 5 + [100]
    assert bench.saved(chat).n_tokens == len(chat)
    assert bench.backend.n_used == 0
    bench.backend.exported.clear()
    park(bench, chat + ONE)
    bench.cache.save_next()
    assert bench.backend.exported == [300], "the end that is short is saved anew, and nothing else"
    assert bench.saved(chat + ONE).n_tokens == len(chat) + 200


def test_a_conversation_that_is_gone_on_with_while_it_is_saved_loses_nothing():
    bench = Bench()
    chat = [number % 241 for number in range(3 * PIECE_TOKENS)]
    park(bench, chat)
    bench.cache.save_next()
    assert bench.saved(chat).n_tokens == PIECE_TOKENS
    lease = bench.cache.acquire(PrefixKey(chat + ONE))
    assert lease is not None
    assert lease.n_cached == len(chat)
    bench.cache.check_integrity()
    bench.cache.release(lease.seq, 0)
    while bench.cache.can_save_next:
        bench.cache.save_next()
        bench.cache.check_integrity()
    assert bench.saved(chat).n_tokens == len(chat)


def test_without_a_spare_sequence_everything_is_exported_and_nothing_lost():
    bench = Bench()
    bench.backend = Sizes()
    bench.cache = Cache(bench.backend, bench.store, bench.clock)
    for letter in range(3):
        assert bench.cache.acquire(PrefixKey([letter] * 10)) is not None
    park(bench, SYSTEM)
    bench.cache.retire()
    assert bench.backend.exported == [len(SYSTEM)]
    assert bench.saved(SYSTEM).n_tokens == len(SYSTEM)
    bench.cache.check_integrity()


def test_a_disk_that_loses_what_it_was_given_is_not_tried_for_ever():
    """One that is short of space takes every write, and the file never comes to be."""

    class Short(MemoryDisk):
        def write(self, record: DiskRecord, data: State) -> bool:
            self.lost.append(record.key)
            return super().write(record, data)

        def take_lost(self) -> list[bytes]:
            for key in list(self.data):
                self.lose(key)
            return super().take_lost()

    backend = Backend()
    now = iter(range(1 << 30))
    cache = Cache(backend, Tiers(0, Short()), lambda: next(now) * 1e-6)
    tokens = [number % 251 for number in range(3 * PIECE_TOKENS)]
    lease = cache.acquire(PrefixKey(tokens))
    assert lease is not None
    batch, count = backend.batch, len(tokens)
    batch.token[:count], batch.pos[:count], batch.seq[:count] = tokens, range(count), lease.seq
    backend.decode(count)
    cache.cells.place([lease.seq] * count)
    cache.release(lease.seq, count)
    for _ in range(5):
        cache.save_next()
    assert not cache.can_save_next
    assert cache.match(PrefixKey([*tokens, 1])) == count, "it stays in its cells"
    cache.check_integrity()
