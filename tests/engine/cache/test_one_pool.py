"""Sequence ids, parked prefixes and saved states, on the fake backend's cells."""

from __future__ import annotations

import pytest

from localrun.engine.backend import MemoryKind
from localrun.engine.cache import copies
from localrun.engine.cache.cache import SCARCE_PART, Cache
from localrun.engine.cache.cells import COMPACT_CELLS, COMPACT_RATIO, MOVE_TOKENS, PoolCells
from localrun.engine.cache.copies import PIECE_TOKENS
from localrun.engine.cache.tiers import GAIN_TOKENS, Tiers
from localrun.engine.cache.tree import PrefixKey
from tests.fakes.backend import FakeBackend

A, B, C = ([letter] * 60 for letter in b"abc")
TAIL = list(b"and so on")


class Bench:
    """A pool over the fake, and requests reduced to what the pool sees of them."""

    def __init__(
        self, *, n_cells: int = 256, n_seqs: int = 6, ram_cache_bytes: int = 1 << 20, backend: FakeBackend | None = None
    ) -> None:
        self.backend = backend or FakeBackend(n_cells=n_cells, n_seqs=n_seqs, n_batch=n_cells)
        now = iter(range(1 << 30))
        self.cache = Cache(self.backend, Tiers(ram_cache_bytes), lambda: next(now) * 1e-6)
        assert isinstance(self.cache.cells, PoolCells)
        self.cells = self.cache.cells
        self.tokens: dict[int, list[int]] = {}

    def start(self, tokens: list[int]) -> tuple[int, int]:
        """Compute `tokens` in a sequence. Returns the sequence and how many of them the cache gave."""
        tokens = list(tokens)  # a request's own, which grows
        lease = self.cache.acquire(PrefixKey(tokens))
        assert lease is not None
        self.tokens[lease.seq] = tokens
        assert self.cache.make_room(len(tokens) - lease.n_cached)
        self.compute(lease.seq, tokens, lease.n_cached)
        self.cache.grow(lease.seq, len(tokens))
        self.check()
        return lease.seq, lease.n_cached

    def compute(self, seq: int, tokens: list[int], n_done: int) -> None:
        batch, count = self.backend.batch, len(tokens) - n_done
        batch.token[:count] = tokens[n_done:]
        batch.pos[:count] = range(n_done, len(tokens))
        batch.seq[:count] = seq
        self.backend.decode(count)
        self.cells.place([seq] * count)

    def decode(self, seq: int, token: int) -> None:
        """One more token of a running sequence."""
        self.tokens[seq].append(token)
        batch = self.backend.batch
        batch.token[0], batch.pos[0], batch.seq[0] = token, self.cells.length(seq), seq
        self.backend.decode(1)
        self.cells.place([seq])
        self.check()

    def park(self, tokens: list[int]) -> int:
        seq, n_cached = self.start(tokens)
        self.cache.release(seq, len(tokens))
        self.check()
        return n_cached

    def save_next(self) -> None:
        while self.cache.can_save_next:
            self.cache.save_next()
            self.check()

    def check(self) -> None:
        self.cache.check_integrity()
        for seq in range(self.backend.n_seqs):
            assert self.cells.cells_of(seq).tolist() == self.backend.cells_of(seq)


def test_a_parked_prefix_is_shared_by_cells_and_a_settled_one_comes_back_from_memory():
    bench = Bench()
    bench.park(A)
    assert bench.backend.n_used == 60
    seq, n_cached = bench.start(A + TAIL)
    assert n_cached == 60
    assert bench.cells.n_shared == 60
    bench.cache.release(seq, len(A + TAIL))
    bench.save_next()
    assert bench.backend.n_used == 0
    assert bench.park(A + TAIL + TAIL) == 60, "a few tokens more are not worth a save"
    bench.save_next()
    assert bench.park(A + TAIL + TAIL + TAIL) == 78
    assert bench.backend.n_rows_computed == 60 + 9 + 18 + 9


def test_what_matches_is_what_an_acquire_gives_and_never_the_last_token():
    bench = Bench()
    bench.park(A)
    assert bench.cache.match(PrefixKey(A)) == 59
    assert bench.cache.match(PrefixKey(A + TAIL)) == 60
    assert bench.cache.match(PrefixKey(B)) == 0
    bench.save_next()
    assert bench.cache.match(PrefixKey(A)) == 59
    assert bench.start(A)[1] == 59


def test_a_saved_state_is_left_alone_where_it_would_give_little_more_than_the_cells_have():
    for gain, expected in ((GAIN_TOKENS - 1, 40), (GAIN_TOKENS, 40 + GAIN_TOKENS)):
        bench = Bench()
        bench.park(A[:40] + B[:gain])
        bench.save_next()
        bench.park(A[:40] + C)
        assert bench.start(A[:40] + B[:gain] + TAIL)[1] == expected


def test_two_that_computed_the_same_end_up_on_the_same_cells():
    bench = Bench()
    first, second = (bench.cache.acquire(PrefixKey(A)) for _ in range(2))
    for lease in (first, second):
        bench.compute(lease.seq, A, 0)
    bench.cache.grow(first.seq, len(A))
    assert bench.backend.n_used == 120
    bench.cache.grow(second.seq, len(A))
    bench.check()
    assert bench.backend.n_used == 60


def test_when_cells_run_out_the_least_recently_used_prefix_goes():
    bench = Bench(n_cells=192, ram_cache_bytes=0)
    for tokens in (A, B, C):
        bench.park(tokens)
    bench.park(A + TAIL)  # uses A again; 189 of 192 cells are taken now
    assert bench.cache.make_room(40)
    bench.check()
    assert [bench.cache.match(PrefixKey(tokens)) for tokens in (A, B, C)] == [59, 0, 59]


def test_a_prefix_that_was_shared_counts_as_used():
    bench = Bench(n_cells=192, ram_cache_bytes=0)
    for tokens in (A, B):
        bench.park(tokens)
    seq, _ = bench.start(A + TAIL)
    bench.cache.release(seq, 0)
    assert bench.cache.make_room(100)
    assert [bench.cache.match(PrefixKey(tokens)) for tokens in (A, B)] == [59, 0]


def test_ids_run_out_only_when_all_of_them_run():
    bench = Bench(n_seqs=3)
    for tokens in (A[:20], B[:20], C[:20]):
        bench.park(tokens)
    leases = [bench.cache.acquire(PrefixKey([letter] * 5)) for letter in b"xyz"]
    assert sorted(lease.seq for lease in leases) == [0, 1, 2]
    assert bench.cache.acquire(PrefixKey(list(b"more"))) is None
    bench.cache.release(leases[0].seq, len([]))
    bench.check()
    assert bench.cache.acquire(PrefixKey(list(b"more"))).seq == leases[0].seq


def test_the_prefix_parked_first_makes_way_and_never_the_donor_if_another_can():
    bench = Bench(n_seqs=3, ram_cache_bytes=0)
    for tokens in (A, B, C):
        bench.park(tokens)
    assert bench.start(A + TAIL)[1] == 60
    assert [bench.cache.match(PrefixKey(tokens)) for tokens in (A, B, C)] == [59, 0, 59]


@pytest.mark.parametrize(("kind", "n_kept"), [(MemoryKind.ATTENTION, 60), (MemoryKind.HYBRID, 0)])
def test_a_picture_of_which_only_a_part_was_computed_is_not_kept(kind: MemoryKind, n_kept: int):
    bench = Bench(backend=FakeBackend(n_cells=256, n_seqs=6, n_batch=256, memory_kind=kind))
    lease = bench.cache.acquire(PrefixKey(A + B, atoms=((60, 120),)))
    assert lease is not None
    bench.compute(lease.seq, (A + B)[:90], 0)
    bench.cache.release(lease.seq, 90)
    bench.check()
    assert bench.backend.n_used == n_kept
    bench.save_next()
    assert bench.cache.match(PrefixKey(A + TAIL)) == n_kept
    assert bench.cache.n_cached_sequences == (1 if n_kept else 0)


def test_a_donor_that_must_go_to_make_room_is_not_shared_from():
    """The saved state of 120 tokens needs the cells of the parked prefix that would be the second choice."""
    bench = Bench(n_cells=192)
    bench.park(A + B)
    bench.save_next()
    bench.park(A + C)
    seq, n_cached = bench.start(A + B + TAIL)
    assert n_cached == 120
    assert bench.backend.tokens_of(seq) == A + B + TAIL


def test_a_saved_state_that_finds_no_room_is_given_up_for_what_the_cells_have():
    bench = Bench(n_cells=192)
    bench.park(A + B)
    bench.save_next()
    seq, _ = bench.start(A + C)  # runs, so its 120 cells cannot go
    assert bench.start(A + B[:10])[1] == 60
    assert bench.backend.tokens_of(seq) == A + C


def test_what_was_shared_before_room_was_made_stays_though_its_donor_went_in_vain():
    """Room for the rest of what is saved is not to be had, and the parked prefix went in the attempt."""
    bench = Bench(n_cells=192)
    bench.park(A + B)
    bench.save_next()
    bench.start(C + C)
    bench.park(A + TAIL)
    lease = bench.cache.acquire(PrefixKey(A + B[:20]))
    bench.check()
    assert lease is not None
    assert lease.n_cached == 60
    assert bench.backend.tokens_of(lease.seq) == A


def test_of_what_is_saved_only_what_the_cells_lack_is_brought():
    bench = Bench(n_cells=4096)
    chat = [number % 249 for number in range(1500)]
    bench.park(chat)
    bench.save_next()
    system, _ = bench.start(chat[:300])
    loaded: list[int] = []
    join = bench.backend.state_join

    def noted(seq, pieces):
        loaded.append(pieces[-1][3] - pieces[0][2])
        return join(seq, pieces)

    bench.backend.state_join = noted  # type: ignore[method-assign]
    seq, n_cached = bench.start([*chat, *TAIL])
    assert n_cached == 1500
    assert sum(loaded) == 1200
    assert max(loaded) <= PIECE_TOKENS
    assert bench.cells.n_shared == 300
    assert bench.backend.tokens_of(seq) == [*chat, *TAIL]
    assert bench.backend.tokens_of(system) == chat[:300]


@pytest.mark.parametrize("is_parked", [False, True], ids=["all run", "one is parked"])
def test_what_comes_piece_by_piece_needs_a_spare_sequence_and_does_without_the_rest_if_there_is_none(
    is_parked: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(copies, "RESTORE_PIECE_S", 0.0)
    bench = Bench(n_cells=4096, n_seqs=3)
    chat = [number % 249 for number in range(1500)]
    bench.park(chat)
    bench.save_next()
    bench.start(A)
    lease = bench.cache.acquire(PrefixKey([*chat, *TAIL]))
    assert lease is not None
    assert (lease.n_here, lease.n_cached) == (PIECE_TOKENS, 1500)
    other, _ = bench.start(B)
    if is_parked:
        bench.cache.release(other, len(B))
    brought = []
    while bench.cache.restoring:
        brought.append(bench.cache.restore_next())
        bench.check()
    expected = [2 * PIECE_TOKENS, 1500] if is_parked else [PIECE_TOKENS]
    assert brought == [(lease.seq, n_tokens) for n_tokens in expected]
    assert bench.backend.tokens_of(lease.seq) == chat[: expected[-1]]
    assert bench.cache.match(PrefixKey(B)) == 59, "it went to memory"


def test_a_piece_that_is_refused_ends_what_comes_back_and_is_thrown_away():
    bench = Bench(n_cells=4096)
    chat = [number % 249 for number in range(1500)]
    bench.park(chat)
    bench.save_next()
    n_blocks, put, n_puts = len(bench.cache.tiers), bench.backend.state_set, 0

    def damaged_at_the_second(seq, state):
        nonlocal n_puts
        n_puts += 1
        return put(seq, state) if n_puts != 2 else False

    bench.backend.state_set = damaged_at_the_second  # type: ignore[method-assign]
    assert bench.start([*chat, *TAIL])[1] == PIECE_TOKENS
    assert len(bench.cache.tiers) == 2 < n_blocks


def test_on_a_gpu_prefixes_begin_to_leave_when_cells_run_short():
    backend = FakeBackend(n_cells=192, n_seqs=6, n_batch=192)
    backend.n_gpu_layers = 99
    bench = Bench(backend=backend)
    for tokens in (A, B):
        bench.park(tokens)
    assert not bench.cache.can_save_next
    bench.start(C)
    assert bench.cells.n_free < 192 // SCARCE_PART
    bench.save_next()
    assert bench.cache.match(PrefixKey(A)) == 59
    assert bench.backend.n_used == 120, "one was enough"


def test_a_state_that_is_pushed_out_of_memory_while_it_makes_room_is_a_miss_and_no_mix_up():
    bench = Bench(n_cells=128, ram_cache_bytes=300)
    bench.park(A)
    bench.save_next()
    assert bench.cache.tiers.size_bytes > 150, "two states do not fit into this memory"
    bench.park(B + B[:9])
    assert bench.cells.n_free < 60
    seq, n_cached = bench.start(A + TAIL)
    assert n_cached in (0, 60)
    assert bench.backend.tokens_of(seq) == A + TAIL
    assert len(bench.cache.tiers) == 1


def test_a_longer_state_takes_the_place_of_those_that_it_covers():
    bench = Bench()
    for tokens in (A, A + TAIL, A + TAIL + B):
        bench.park(tokens)
        bench.save_next()
        assert len(bench.cache.tiers) == 1
    bench.park(A + C)
    bench.save_next()
    assert len(bench.cache.tiers) == 2


def test_a_longer_state_pushes_out_nobody_while_its_own_predecessor_can_go():
    bench = Bench(ram_cache_bytes=430)
    bench.park(B)
    bench.save_next()
    bench.park(A)
    bench.save_next()
    assert bench.cache.tiers.size_bytes > 350
    bench.park(A + TAIL + TAIL)
    bench.save_next()
    assert bench.cache.match(PrefixKey(B)) == 59
    assert bench.cache.match(PrefixKey(A + TAIL + TAIL)) == 77


def test_a_prefix_that_was_saved_before_is_not_saved_again_but_counts_as_used():
    bench = Bench(ram_cache_bytes=400)
    bench.park(A)
    bench.save_next()
    seq, _ = bench.start(A)
    bench.park(B)
    bench.save_next()
    bench.cache.release(seq, len(A))
    bench.save_next()
    assert len(bench.cache.tiers) == 2
    assert bench.cache.tiers.size_bytes > 350, "three do not fit"
    bench.park(C)
    bench.save_next()
    assert [bench.cache.match(PrefixKey(tokens)) for tokens in (A, B, C)] == [59, 0, 59]


def test_a_prefix_too_large_for_memory_stays_in_its_cells_until_they_are_needed():
    bench = Bench(n_cells=192, ram_cache_bytes=150)
    bench.park(A)
    bench.save_next()
    assert bench.backend.n_used == 60
    assert bench.cache.n_cached_sequences == 1
    assert bench.start(A + TAIL)[1] == 60
    assert bench.cache.make_room(192 - 69)
    assert len(bench.cache.tiers) == 0


def test_a_sequence_that_is_forgotten_leaves_its_cells_to_those_that_share_them():
    bench = Bench()
    first, _ = bench.start(A)
    second, _ = bench.start(A + TAIL)
    bench.cache.release(first, 0)
    bench.check()
    assert bench.backend.tokens_of(second) == A + TAIL
    assert bench.cache.match(PrefixKey(A + TAIL)) == 68
    bench.cache.release(second, 0)
    bench.check()
    assert bench.backend.n_used == 0
    assert bench.cache.match(PrefixKey(A)) == 0


def test_obtainable_are_all_cells_but_those_of_others_that_run():
    bench = Bench(n_cells=256)
    assert bench.cache.n_obtainable(PrefixKey(A)) == 256
    bench.park(B)
    assert bench.cache.n_obtainable(PrefixKey(A)) == 256
    bench.start(A)
    bench.start(A + TAIL)
    assert bench.cache.n_obtainable(PrefixKey(C)) == 256 - 69
    assert bench.cache.n_obtainable(PrefixKey(A + C)) == 256 - 69 + 60


def test_a_damaged_state_is_a_miss_and_is_thrown_away():
    bench = Bench()
    bench.park(A)
    bench.save_next()
    bench.backend.state_set = lambda seq, state: False  # type: ignore[method-assign]
    assert bench.start(A + TAIL)[1] == 0
    assert len(bench.cache.tiers) == 0


def test_prefixes_too_short_to_save_are_not_kept_in_cells_unless_cells_are_all_there_is():
    short = A[: GAIN_TOKENS - 1]
    for ram_cache_bytes, n_kept in ((1 << 20, 0), (0, len(short))):
        bench = Bench(ram_cache_bytes=ram_cache_bytes)
        bench.park(short)
        assert bench.backend.n_used == n_kept
        assert not bench.cache.can_save_next


def test_a_span_much_longer_than_the_used_cells_shrinks_and_everybody_keeps_their_tokens():
    bench = Bench(n_cells=4096)
    below, _ = bench.start([1] * (COMPACT_CELLS + 400))
    first, _ = bench.start(A)
    second, _ = bench.start(B)
    assert bench.cache.compact() is None
    assert bench.backend.cells_of(second)[0] > COMPACT_CELLS, "a span that is full is left alone"
    bench.cache.release(below, 0)
    n_used, span = bench.cells.n_used, bench.cells.span
    assert span > COMPACT_RATIO * n_used + COMPACT_CELLS
    for _ in range(3):
        assert bench.cache.compact() is None, "numbers stay"
        bench.check()
    assert bench.cells.n_used == n_used
    assert bench.cells.span <= COMPACT_RATIO * n_used + COMPACT_CELLS
    assert bench.backend.tokens_of(first) == A
    assert bench.backend.tokens_of(second) == B


def compacted(bench: Bench) -> list[int]:
    """Compact until it is done. Returns how many cells each move took from the span."""
    gains = []
    while bench.cells.span > COMPACT_RATIO * bench.cells.n_used + COMPACT_CELLS:
        before = bench.cells.span
        assert bench.cache.compact() is None, "numbers stay"
        bench.check()
        gains.append(before - bench.cells.span)
    assert bench.cache.compact() is None
    return gains


def test_a_shared_prompt_is_moved_for_all_who_share_it_and_stays_shared():
    bench = Bench(n_cells=4096)
    below, _ = bench.start([1] * 3000)
    first, _ = bench.start(A + B)
    second, _ = bench.start(A + B + TAIL)
    third, _ = bench.start(A + C)
    bench.cache.release(below, 0)
    n_used, n_shared = bench.cells.n_used, bench.cells.n_shared
    assert n_shared == 120
    assert all(gain > 0 for gain in compacted(bench))
    assert (bench.cells.n_used, bench.cells.n_shared) == (n_used, n_shared)
    assert bench.cells.span <= n_used + COMPACT_CELLS
    for seq, tokens in ((first, A + B), (second, A + B + TAIL), (third, A + C)):
        assert bench.backend.tokens_of(seq) == tokens
        assert bench.start([*tokens, 1])[1] == len(tokens)


def test_only_the_tails_behind_a_hole_are_moved_and_a_piece_at_a_time():
    bench = Bench(n_cells=16_384)
    prompt = [number % 250 for number in range(4_000)]
    leader, _ = bench.start(prompt)
    below, _ = bench.start([1] * 9_000)
    tails = [[letter] * 700 for letter in b"xyz"]
    followers = [bench.start(prompt + tail)[0] for tail in tails]
    prompt_cells = bench.backend.cells_of(leader)
    bench.cache.release(below, 0)
    n_moved: list[int] = []
    move = bench.cells.move
    bench.cells.move = lambda seqs, start, end: (n_moved.append(end - start), move(seqs, start, end))  # type: ignore[method-assign,assignment,func-returns-value]
    assert all(gain > 0 for gain in compacted(bench))
    assert max(n_moved) == MOVE_TOKENS
    assert sum(n_moved) <= 3 * 700
    assert bench.backend.cells_of(leader) == prompt_cells
    assert [bench.backend.tokens_of(seq) for seq in followers] == [prompt + tail for tail in tails]


def test_streams_that_decode_in_lockstep_are_moved_once_each():
    bench = Bench(n_cells=8192, n_seqs=20)
    below, _ = bench.start([1] * 6000)
    seqs = [bench.start([*A, letter])[0] for letter in b"stuvwxyz"]
    streams = {seq: bench.tokens[seq] for seq in seqs}
    batch = bench.backend.batch
    for step in range(40):
        for row, (seq, tokens) in enumerate(streams.items()):
            tokens.append(step)
            batch.token[row], batch.pos[row], batch.seq[row] = step, len(tokens) - 1, seq
        bench.backend.decode(len(streams))
        bench.cells.place(list(streams))
    bench.cache.release(below, 0)
    assert len(compacted(bench)) <= len(streams) + 1
    assert {seq: bench.backend.tokens_of(seq) for seq in streams} == streams


def test_without_a_spare_sequence_a_parked_one_gives_way_to_a_move():
    bench = Bench(n_cells=4096, n_seqs=3)
    bench.park(B)
    below, _ = bench.start([1] * 3000)
    last, _ = bench.start(A)
    bench.cache.release(below, 0)
    bench.cache.acquire(PrefixKey(C))
    assert [gain > 0 for gain in compacted(bench)] == [False, True]
    assert bench.backend.tokens_of(last) == A
    assert bench.cache.match(PrefixKey(B)) == 59, "it went to the store"


def test_when_all_sequences_run_nothing_is_moved():
    bench = Bench(n_cells=4096, n_seqs=2)
    below, _ = bench.start([1] * 3000)
    bench.start(A)
    bench.cache.release(below, 0)
    bench.cache.acquire(PrefixKey(C))
    span = bench.cells.span
    assert bench.cache.compact() is None
    assert bench.cells.span == span


def test_while_others_run_a_prefix_goes_when_looking_at_it_has_cost_as_much_as_copies_do():
    bench = Bench(n_cells=1024)
    bench.park(A)
    bench.save_next()
    bench.park(A + TAIL)  # saved and restored: it is known now what copies take
    bench.save_next()
    copy_s = bench.cache.tiers.copy_s_per_token
    assert copy_s > 0
    n_rows = 40
    attend_s = copy_s / (n_rows - 0.5)
    bench.cache.tiers.recompute_s = lambda start, n_tokens: n_tokens * (1e-3 + start * attend_s)  # type: ignore[method-assign]
    bench.cache.clear(ram=True, disk=False)
    runner, _ = bench.start(B)
    bench.park(C)
    for position in range(n_rows):
        assert not bench.cache.can_save_next
        bench.cache.save_next()
        assert bench.backend.n_used == 120 + position
        bench.decode(runner, 7)
    assert bench.cache.can_save_next
    bench.save_next()
    assert bench.backend.n_used == 60 + n_rows
    assert bench.cache.match(PrefixKey(C)) == 59


def test_nothing_is_lost_by_moving_a_prefix_while_nobody_runs():
    bench = Bench()
    bench.cache.tiers.recompute_s = lambda start, n_tokens: n_tokens * 1e-3  # type: ignore[method-assign]
    bench.park(A)
    bench.save_next()
    assert bench.backend.n_used == 0


def test_on_a_gpu_prefixes_stay_in_their_cells_until_these_are_needed():
    backend = FakeBackend(n_cells=192, n_seqs=6, n_batch=192)
    backend.n_gpu_layers = 99
    bench = Bench(backend=backend)
    short = list(b"short")
    for tokens in (short, A, B):
        bench.park(tokens)
    assert not bench.cache.can_save_next
    bench.cache.save_next()
    assert bench.backend.n_used == 125
    assert len(bench.cache.tiers) == 0
    assert bench.start(A + TAIL)[1] == 60
    assert bench.cells.n_shared == 60, "a hit costs no copy"
    assert bench.cache.make_room(100)
    bench.check()
    assert bench.cache.match(PrefixKey([*short, 1])) == 0
    assert bench.cache.match(PrefixKey(B)) == 59
    assert len(bench.cache.tiers) == 1, "what had to go was saved"
    bench.cache.retire()
    assert bench.cache.match(PrefixKey(A)) == 59


def test_retiring_moves_everything_parked_to_the_store():
    bench = Bench()
    for tokens in (A, B):
        bench.park(tokens)
    bench.cache.retire()
    bench.check()
    assert bench.backend.n_used == 0
    assert [bench.cache.match(PrefixKey(tokens)) for tokens in (A, B)] == [59, 59]


def test_clearing_memory_forgets_parked_and_saved_prefixes_and_spares_running_ones():
    bench = Bench()
    bench.park(A)
    bench.save_next()
    bench.park(B)
    seq, _ = bench.start(C)
    bench.cache.clear(ram=True, disk=False)
    bench.check()
    assert [bench.cache.match(PrefixKey(tokens)) for tokens in (A, B)] == [0, 0]
    assert bench.backend.tokens_of(seq) == C


def test_what_another_adapter_computed_is_nobodys_beginning():
    bench = Bench()
    bench.park(A)
    seq, _ = bench.start(B)
    assert bench.cache.match(PrefixKey(A, b"adapter")) == 0
    assert not bench.cache.follow(seq, PrefixKey(B + TAIL, b"adapter"), 0)
    lease = bench.cache.acquire(PrefixKey(A, b"adapter"))
    assert lease is not None
    assert lease.n_cached == 0
    bench.check()
