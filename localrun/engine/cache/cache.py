"""The prefix cache: a sequence's life, from what is found of its prompt to what is kept of it.

Owner: the engine's main thread. A sequence id is *free*, *running* (a request owns it, from `acquire` to `release`) or
*parked*: a finished request's tokens stay in their cells until the cells are needed. What is worth saving is saved to
memory and disk (`copies.py`), a piece at a time beside the steps (`save_next`). Restoring it takes about a hundredth of
the time that computing it took. How a prompt begins depends on the layout (`cells.py`):

* One pool: the prompt shares the cells of the sequence that holds most of it. Every row attends over the whole span, so
  parked sequences leave their cells as soon as nothing runs, or once attending over them has cost the running ones as
  much as the copies take. On a GPU, which reads cells quickly, they leave when cells run short. Cells behind a hole are
  moved into it.
* Streams: a parked sequence is continued, a running one is copied. A request with many tokens to compute begins in the
  *pool* of the background, which nobody may touch while the background is busy, and moves to a stream when its prompt
  is done. One that is longer than a stream stays in the pool, and one that outgrows its stream moves there. What is
  parked there and saved leaves it for them: on a CPU attending over it costs more than bringing it back.
* Whole states: a parked sequence is continued if the prompt starts with all of it; otherwise the longest checkpoint is
  restored (`Checkpoints`). Saved sequences keep their cells only while nothing runs.

A chunk of media is one piece to the cache: sequences are cut, copied and kept before it or behind it. What a running
request has computed of half a chunk is its own.

Invariant: for every sequence, the backend, the book of cells and the tree agree on its tokens (`check_integrity`).
Does not: decide who runs (`scheduler.py`), or what to evict when memory is short (`tiers.py`). Its clock is passed in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple

from localrun.engine.backend import Backend
from localrun.engine.cache import copies
from localrun.engine.cache.cells import Cells, Chunks, Layout, OnePool, PoolCells, Streams, WholeStates
from localrun.engine.cache.copies import Checkpoints, Copies
from localrun.engine.cache.tiers import GAIN_TOKENS, Tiers
from localrun.engine.cache.tree import PrefixKey, common_prefix

# A request for whose answer less than this part of a stream would be left begins in the pool: moving it later takes a
# copy. One that runs moves when less than the smaller part is left, for it may wait for a batch of the background.
SOON_PART = 16
NEAR_PART = 64
# On a GPU parked sequences leave when less than one part in so many of the cells is free, so that nobody waits for
# them.
SCARCE_PART = 8
# Copied in some milliseconds, even into memory that was never written to.
QUICK_BYTES = 8 << 20
# The distance of two positions whose rows show what attending over one cell costs a row.
_DEPTH_TOKENS = 1024


class SequenceLease(NamedTuple):
    """A sequence for a request, and how many of its tokens need not be computed. `n_here` of them are there already;
    the rest comes with `restore_next`."""

    seq: int
    n_cached: int
    n_here: int


class _Match(NamedTuple):
    """What the cache has of a prompt: `n_cells` tokens in the cells of `seq` (-1: none), and `n_saved` saved tokens."""

    n_cells: int
    seq: int
    n_saved: int


class _Start(NamedTuple):
    """How a request would begin: in `seq`, None if there is none, where a parked sequence `goes_on`, or after whatever
    is parked there was evicted."""

    found: _Match
    seq: int | None
    goes_on: bool


class Cache:
    """See the module. `takes(n_new, depth)` says whether a request with `n_new` tokens to compute, behind `depth` that
    are there, is computed in the background."""

    def __init__(
        self,
        backend: Backend,
        tiers: Tiers,
        clock: Callable[[], float],
        takes: Callable[[int, int], bool] = lambda n_new, depth: False,
    ) -> None:
        self.tiers = tiers
        self._backend = backend
        self._clock = clock
        self._takes = takes
        self._checkpoints = Checkpoints(tiers, backend.message_ends)
        self._open()

    def _open(self) -> None:
        """Start with empty cells."""
        backend = self._backend
        self._layout: Layout = WholeStates(backend) if not backend.cuts_states else OnePool(backend)
        if backend.is_split:
            self._layout = Streams(backend)
        self._free = set(range(self._layout.n_seqs))
        self._running: dict[int, list[int]] = {}  # with the positions at which steps must end, in order
        self._keys: dict[int, PrefixKey] = {}  # of running and parked sequences
        self.restoring: dict[int, int] = {}  # running sequences that are still being restored, and their target lengths
        self._saved: set[int] = set()  # parked and saved, in layouts where saved ones leave their cells
        self._copies = Copies(backend, self._layout, self.tiers, self._checkpoints, self._keys, self._clock)

    @property
    def cells(self) -> Cells:
        return self._layout.cells

    @property
    def pool(self) -> PoolCells:
        """The cells beside the streams; all cells where there are none."""
        return self._layout.pool

    @property
    def n_cached_sequences(self) -> int:
        """The number of prefixes that are kept for later."""
        return len(self.tiers.parked) - len(self._saved) + len(self.tiers)

    @property
    def can_save_next(self) -> bool:
        """Whether `save_next` has something to do."""
        return self._copies.saving is not None or self._due() is not None

    @property
    def attend_s(self) -> float:
        """Seconds that a row takes to attend over a cell."""
        recompute_s = self.tiers.recompute_s
        return (recompute_s(_DEPTH_TOKENS, 1) - recompute_s(0, 1)) / _DEPTH_TOKENS

    # --- what is cached ------------------------------------------------------------------------------------------

    def match(self, key: PrefixKey) -> int:
        """How many leading tokens an `acquire` would get without computing. The last token is never among them."""
        found = self._find(self._here(key))
        return max(found.n_cells, found.n_saved)

    def follow(self, seq: int, key: PrefixKey, n_matched: int) -> bool:
        """Whether a request with `n_matched` cached tokens gains by waiting for the running `seq`, which is computing
        more of the same prefix."""
        ahead, key = self._keys[seq], self._here(key)
        if ahead.salt != key.salt:
            return False
        if self._layout.can_share:
            return True  # whatever `seq` computes can be shared at once
        n_common = key.floor(common_prefix(ahead.tokens, key.tokens, 0, len(key.tokens) - 1))
        n_computed = self.tiers.tree.length(seq)
        if self._layout.can_cut:
            return n_common - max(n_matched, n_computed) >= GAIN_TOKENS
        return self._checkpoints.follow(self._running[seq], n_computed, n_common, n_matched)

    def outgrows(self, n_tokens: int, n_more: int) -> bool:
        """Whether a request with so many tokens, and at most so many to come, does not fit into a stream for long."""
        if not isinstance(self._layout, Streams):
            return False
        return n_tokens + min(n_more, self.cells.n_cells // SOON_PART) > self.cells.n_cells

    @property
    def near_tokens(self) -> int:
        """So many tokens nearly fill a stream."""
        return self.cells.n_cells - self.cells.n_cells // NEAR_PART

    def n_obtainable(self, key: PrefixKey, *, is_long: bool = False) -> int:
        """Cells that a request could have if all parked sequences left, including those that it would share. One that
        `is_long` has them in the pool beside the streams."""
        if isinstance(self._layout, Streams):
            if not is_long:
                return copies.UNCOUNTED  # it gets its own stream, whatever the others hold
            n_promised = sum(len(self._keys[seq].tokens) for seq in self._running if self._is_in_pool(seq))
            return self._layout.pool.n_cells - n_promised
        n_shared = 0
        if self._layout.can_share:
            n_shared, _ = self.tiers.match(self._here(key), len(key.tokens) - 1).held(self._running.keys())
        return self.cells.n_cells - self._n_running_cells() + n_shared

    # --- a sequence's life ---------------------------------------------------------------------------------------

    def acquire(self, key: PrefixKey, chunks: Chunks = (), *, is_long: bool = False) -> SequenceLease | None:
        """A sequence that already holds as much of a prompt as the cache has. None if no sequence is left. `chunks` are
        those of the key's atoms. `is_long`: it stays in the pool beside the streams (`outgrows`).

        The key's list belongs to the request and may grow; the cache reads it as long as the sequence runs.
        """
        key = self._here(key)
        found, seq, goes_on = self._start(key, is_long=is_long)
        if goes_on and seq is not None:
            self._continue(seq, key, found.n_cells)
        if self._saved:
            for saved in list(self._saved):
                self._unpark(saved)
            if not goes_on:
                seq = self._next_seq(in_pool=False, spare=found.seq)  # one of these, rather than one that is not saved
        if seq is None:
            return None
        if not goes_on:
            self._vacate(seq)
        self._free.discard(seq)
        self._layout.set_chunks(seq, chunks)
        if self._is_in_pool(seq):
            self._leave_pool(spare=found.seq)
        n_cached = found.n_cells if goes_on else self._fill(seq, key)
        if self._is_in_pool(seq):
            self._leave_pool()  # whose cells were shared, too
        stops: list[int] = []
        if not self._layout.can_cut:
            n_common = key.floor(self.tiers.match(key, len(key.tokens) - 1).n_tokens)
            stops = self._checkpoints.stops(key, n_cached, n_common)
        self._running[seq] = stops
        self._keys[seq] = key
        self._grow(seq, n_cached)
        return SequenceLease(seq, self.restoring.get(seq, n_cached), n_cached)

    def is_ready(self, key: PrefixKey, *, is_long: bool = False) -> bool:
        """Whether `acquire` would not hold up running streams. If not, what they would wait for is on its way beside
        the steps: ask again after the next one."""
        if not self._running or not isinstance(self._layout, Streams):
            return True
        key = self._here(key)
        found, seq, goes_on = self._start(key, is_long=is_long)
        if seq is None:
            return True
        is_kept = goes_on and found.n_cells == self.cells.length(seq)
        if not is_kept and not self._is_in_pool(seq) and self._is_long_unsaved(seq):
            return False  # `save_next` saves it
        is_shared = self._can_share(found.seq, seq) and found.n_cells >= found.n_saved
        n_copied = 0 if goes_on or is_shared else max(found.n_cells, found.n_saved)
        return self._is_warm(seq, n_copied, n_copied)

    def warm_streams(self, lengths: Iterable[int]) -> None:
        """Prompts of so many tokens are about to leave the background for a stream each."""
        streams = sorted(seq for seq in self._free if not self._is_in_pool(seq))
        streams += [seq for seq in self.tiers.parked if not self._is_in_pool(seq)]
        for seq, n_tokens in zip(streams, lengths, strict=False):
            self._backend.warm(seq, n_tokens, moves=True)

    def next_stop(self, seq: int, n_computed: int) -> int | None:
        """The next position behind `n_computed` at which a step of this sequence must end; None if there is none."""
        stops = self._running[seq]
        at = bisect_right(stops, n_computed)
        return stops[at] if at < len(stops) else None

    def make_room(self, n_cells: int, *, in_pool: bool = False) -> bool:
        """Free cells by moving parked sequences out. False if that is not enough. Streams have room for whoever is in
        them; `in_pool` are cells beside them, which the background must not be using."""
        if isinstance(self._layout, Streams) and not in_pool:
            return True
        cells = self.pool if in_pool else self.cells
        while cells.n_free < n_cells:
            seq = next((seq for seq in self.tiers.parked if not in_pool or self._is_in_pool(seq)), None)
            if seq is None:
                return False
            self._vacate(seq)
        return True

    def n_free(self, *, in_pool: bool = False) -> int:
        """Cells that are free now: of each stream, or in the pool."""
        return (self.pool if in_pool else self.cells).n_free

    def grow(self, seq: int, n_tokens: int) -> None:
        """A running sequence now holds `n_tokens` of its tokens, which others may reuse."""
        self._grow(seq, self._keys[seq].floor(n_tokens))
        if n_tokens in self._running[seq]:
            self._copies.save_whole(seq, self._keys[seq])

    def rewind(self, seq: int, n_tokens: int) -> int:
        """A step failed half way: cut a running sequence back to its first `n_tokens`, or to fewer if it cannot be cut
        there. Returns how many it holds."""
        n_tokens = self._keys[seq].floor(n_tokens)
        if not self._layout.cut(seq, n_tokens):
            self._layout.cut(seq, 0)
            n_tokens = self._copies.restore_whole(seq, self._keys[seq], n_tokens, self.make_room)
        self.tiers.tree.cut(seq, n_tokens)
        return n_tokens

    def take_off(self, seq: int, n_tokens: int) -> int:
        """Of the rows that the last step appended to a running sequence only those up to `n_tokens` were right. Returns
        how many it holds then: fewer, if it cannot be cut there after all."""
        return n_tokens if self.cells.length(seq) <= n_tokens else self.rewind(seq, n_tokens)

    def release(self, seq: int, n_tokens: int) -> None:
        """A request is done with its sequence, which holds `n_tokens` of its tokens, or nothing that is
        to be kept. They are kept if that pays."""
        del self._running[seq]
        self.restoring.pop(seq, None)
        n_whole = self._keys[seq].floor(n_tokens)
        n_tokens = n_whole if n_whole == n_tokens or self._layout.cut(seq, n_whole) else 0
        if not n_tokens:
            self._clear(seq)
            return
        self._grow(seq, n_tokens)
        is_saved = self.tiers.is_worth_saving(n_tokens) if self._layout.can_cut else self.tiers.is_on
        if not is_saved:
            self.tiers.passed_over(n_tokens)
        self.tiers.park(seq, self.cells.n_placed if is_saved else None)
        if self._layout.can_share and not is_saved and self.tiers.is_on and not self._backend.n_gpu_layers:
            self._unpark(seq)

    def move_to_stream(self, seq: int) -> int:
        """The prompt of a background sequence is done. Returns the stream in which it continues."""
        target = self._next_seq(in_pool=False, spare=-1)
        assert target is not None, "more requests than streams"
        self._move(seq, target)
        return target

    def try_move_to_stream(self, seq: int) -> int | None:
        """The same for a guest of the pool, whose answer goes on; None as long as others would feel it."""
        target = self._next_seq(in_pool=False, spare=-1)
        if target is None or self._is_long_unsaved(target):
            return None
        n_tokens = self.cells.length(seq)
        return self.move_to_stream(seq) if self._is_warm(target, n_tokens, n_tokens, moves=True) else None

    def move_to_pool(self, seq: int, *, is_urgent: bool) -> int | None:
        """A request outgrows its stream. Returns the sequence in the pool in which it continues; None if there is no
        room, or unless it `is_urgent` if others would wait for memory. Not while the background is busy."""
        target = self._next_seq(in_pool=True, spare=-1)
        if target is None:
            return None
        n_tokens, n_most = self.cells.length(seq), self.cells.n_cells
        if not (is_urgent or self._is_warm(target, n_tokens, n_most, moves=True)):
            return None
        if not self.make_room(n_tokens + 1, in_pool=True):
            return None
        self._leave_pool()
        self._move(seq, target)
        return target

    # --- beside the steps ----------------------------------------------------------------------------------------

    def save_next(self) -> None:
        """Save a piece of one parked sequence, or continue with a stream; if nothing runs, wait for that."""
        saving = self._copies.saving
        if saving is not None:
            if saving.copy.has_left or self._can_touch(saving.seq):
                self._copies.go_on(0.0 if self._running else copies.WAIT_S)
            return
        seq = self._due()
        if seq is None:
            return
        if isinstance(self._layout, Streams) and seq < self._layout.n_main:
            self._copies.begin(seq)
            return
        self._save_parked(seq, at_once=False, leaves=True)
        if any(map(self._is_in_pool, self._running)):
            self._leave_pool()

    def restore_next(self) -> tuple[int, int] | None:
        """Restore the next piece of a sequence. Returns the sequence and how many tokens it has now; that is final
        unless it is still in `restoring`. What is no longer available is left to be computed."""
        if not self.restoring:
            return None
        seq, most = next(iter(self.restoring.items()))
        key = self._keys[seq]
        wanted = min(most, key.cut_after(self.cells.length(seq), self._copies.restored_tokens))
        n_tokens = self._restore(seq, key, wanted)
        if n_tokens in (most, self.tiers.tree.length(seq)) or n_tokens < wanted:
            del self.restoring[seq]
        self._grow(seq, n_tokens)
        return seq, n_tokens

    def compact(self) -> tuple[int, int] | None:
        """Move one running sequence, or a piece of it, to where its rows cost less. Returns its old and new number if
        the number changes."""
        if isinstance(self._layout, Streams):
            running = [seq for seq in self._running if seq < self._layout.n_main]
            hole = next((seq for seq in range(len(running)) if seq not in self._running), None)
            if hole is None:
                if self._layout.is_loose and not self._is_busy:
                    self._layout.tighten(self._backend.pool_spare)
                return None
            seq = max(running)
            n_tokens = self.cells.length(seq)
            n_soon = n_tokens + copies.BLOCK_TOKENS - n_tokens % copies.BLOCK_TOKENS  # it grows meanwhile
            if self._is_long_unsaved(hole) or not self._is_warm(hole, n_tokens, n_soon):
                return None  # later: it would hold up everybody
            self._move(seq, hole)
            return seq, hole
        if isinstance(self._layout, OnePool) and self._layout.is_loose:
            if self._free:
                self._layout.tighten(min(self._free))
            elif self.tiers.parked:
                self._vacate(next(iter(self.tiers.parked)))  # the next call has a spare sequence
        return None

    def clear(self, *, ram: bool, disk: bool) -> None:
        """Forget what is kept: in cells and memory, on disk, or both. Running sequences keep their tokens."""
        self.tiers.clear(ram=ram, disk=disk)
        if ram:
            self._copies.saving = None
            for seq in list(self.tiers.parked):
                if self._can_touch(seq):
                    self._unpark(seq)

    def retire(self) -> None:
        """Save everything that is kept in cells, because the cells will be lost."""
        while self._copies.saving is not None:
            self._copies.go_on(copies.WAIT_S)
        for seq in list(self.tiers.unsaved):
            self._save_parked(seq, leaves=True)

    def renew(self) -> None:
        """Have new cells. Nothing may run. Parked sequences are saved as far as there is room."""
        assert not self._running, "cells in use"
        self.retire()
        for seq in list(self.tiers.parked):
            self.tiers.unpark(seq)
            self.tiers.tree.leave(seq)
        self._backend.rebuild()
        self._open()

    def check_integrity(self) -> None:
        """Raises AssertionError where the books disagree."""
        layout, tree, parked = self._layout, self.tiers.tree, self.tiers.parked.keys()
        self.tiers.check_integrity()
        layout.pool.check_integrity()
        ids = [*self._free, *parked, *self._running]
        assert sorted(ids) == list(range(layout.n_seqs)), "a sequence id is lost or double"
        assert self._keys.keys() == parked | self._running.keys(), "keys of other sequences than those in use"
        for seq in self._free:
            assert self.cells.length(seq) == 0, f"free sequence {seq} holds cells"
            assert tree.length(seq) == 0, f"free sequence {seq} is in the tree"
        for seq in parked:
            assert self.cells.length(seq) == tree.length(seq), f"parked sequence {seq} is not all in the tree"
        for seq, stops in self._running.items():
            assert tree.length(seq) <= self.cells.length(seq), f"the tree promises more of {seq} than there is"
            assert stops == sorted(set(stops)), f"the stops of sequence {seq} are out of order"
        for seq, key in self._keys.items():
            assert self.cells.length(seq) <= len(key.tokens), f"sequence {seq} holds more than its tokens"
            n_held, _ = tree.match(key._replace(atoms=()), tree.length(seq)).held({seq})
            assert n_held == tree.length(seq), f"sequence {seq} is in the tree with other tokens"
        assert self._saved <= parked - self.tiers.unsaved.keys(), "a sequence is to be saved that is saved"
        assert not (self._saved and self._running), "rows attend over what is saved"
        assert self.restoring.keys() <= self._running.keys(), "a sequence is being restored that does not run"
        if isinstance(layout, OnePool):
            held = {cell for seq in self._running for cell in layout.pool.cells_of(seq).tolist()}
            assert self._n_running_cells() == len(held), "cells of running sequences are counted twice or not at all"

    # --- how a sequence begins -----------------------------------------------------------------------------------

    def _here(self, key: PrefixKey) -> PrefixKey:
        """The key of states as this layout computes them."""
        salt = self._backend.state_salt
        return key._replace(salt=key.salt + salt) if salt else key

    def _find(self, key: PrefixKey) -> _Match:
        path = self.tiers.match(key, len(key.tokens) - 1)
        parked = self.tiers.parked.keys()
        if not self._layout.can_cut:
            states = path.states()
            return _Match(*path.ended(parked), states[-1].end if states else 0)
        # The background's sequences must not be read while it computes.
        n_cells, seqs = path.held(set(range(self._layout.n_main)) if self._is_busy else None)
        if n_cells < (1 if self._layout.can_share else GAIN_TOKENS):
            n_cells, seqs = 0, set()
        return _Match(n_cells, max(seqs & parked or seqs, default=-1), path.saved().n_tokens)

    def _start(self, key: PrefixKey, *, is_long: bool) -> _Start:
        found = self._find(key)
        if is_long and self._is_busy:
            return _Start(found, None, False)
        n_found = max(found.n_cells, found.n_saved)
        n_last = len(key.tokens) - key.floor(len(key.tokens) - 1)  # computed among the streams, for their logits
        in_pool = is_long or (
            not self._is_busy
            and self._takes(len(key.tokens) - n_found - n_last + 1, n_found)
            and self.n_obtainable(key, is_long=True) >= len(key.tokens)
        )
        if self._goes_on(found, in_pool=in_pool):
            return _Start(found, found.seq, True)
        return _Start(found, self._next_seq(in_pool=in_pool, spare=found.seq), False)

    def _goes_on(self, found: _Match, *, in_pool: bool) -> bool:
        """Whether the request continues a parked sequence in place."""
        is_there = found.seq in self.tiers.parked and found.n_cells >= found.n_saved
        if not is_there or self._layout.can_share or self._is_in_pool(found.seq) != in_pool:
            return False
        # In the pool whoever branches off shares what is common.
        is_all = found.n_cells == self.cells.length(found.seq)
        return not in_pool or is_all or all(not self._is_in_pool(seq) for seq in self._free)

    def _can_share(self, source: int, target: int) -> bool:
        return self._layout.can_share or (self._is_in_pool(source) and self._is_in_pool(target))

    def _continue(self, seq: int, key: PrefixKey, n_tokens: int) -> None:
        """Unpark a sequence, cut to its first `n_tokens`."""
        if not self._layout.can_cut or n_tokens < self.cells.length(seq):
            self._save_parked(seq)  # others may branch off from what it has now
            self._layout.cut(seq, n_tokens)
            self.tiers.tree.cut(seq, n_tokens)
        elif self._copies.is_reading(seq):
            self._copies.saving = None  # it is about to change, and is saved when the request ends
        self.tiers.unpark(seq)
        self._saved.discard(seq)
        states = [] if self._layout.can_cut else self.tiers.match(key, n_tokens).states()
        if states and states[-1].end == n_tokens:
            self._copies.note_start(states[-1])

    def _next_seq(self, *, in_pool: bool, spare: int) -> int | None:
        """The lowest free sequence, in the background or not; otherwise the one that was parked first, and `spare` only
        if there is no other. None if there is none at all."""
        free = [seq for seq in self._free if self._is_in_pool(seq) == in_pool]
        if free:
            return min(free)
        parked = [seq for seq in self.tiers.parked if self._is_in_pool(seq) == in_pool]
        return next((seq for seq in parked if seq != spare), parked[0] if parked else None)

    def _fill(self, seq: int, key: PrefixKey) -> int:
        """Copy what the cache has of a prompt into an empty sequence. Returns how many tokens that is."""
        if not self._layout.can_cut:
            return self._copies.restore_whole(seq, key, len(key.tokens) - 1, self.make_room)
        found = self._find(key)
        if self._is_in_pool(seq):
            is_fitting = self.make_room(0 if self._is_in_pool(found.seq) else found.n_cells, in_pool=True)
            found = self._find(key) if is_fitting else found._replace(n_cells=0, seq=-1)
        is_copied = not self._can_share(found.seq, seq) and found.n_cells >= found.n_saved + GAIN_TOKENS
        is_quick = self._is_quick(found.n_cells) or not self._running
        if is_copied and is_quick and self.tiers.is_worth_saving(found.n_cells):
            self._copies.save(found.seq, key, found.n_cells, self._spare_of(found.seq))  # others will want it, too
            found = self._find(key)
        is_shared = self._can_share(found.seq, seq)
        least_gain = GAIN_TOKENS if is_shared else 1 - GAIN_TOKENS
        brings_saved = found.n_saved >= max(GAIN_TOKENS, found.n_cells + least_gain)
        if not brings_saved or (is_shared and self._spare_of(seq) is not None):
            self._give(found, seq)
        n_saved = found.n_saved
        if brings_saved and self._layout.can_share and self._free and self._running:
            n_now = key.cut_after(self.cells.length(seq), self._copies.restored_tokens)
            if n_now < n_saved:
                self.restoring[seq], n_saved = n_saved, n_now
        if brings_saved and not self._restore(seq, key, n_saved):
            self.restoring.pop(seq, None)
            self._give(self._find(key), seq)  # the donor may have been evicted to make room
        return self.cells.length(seq)

    def _give(self, found: _Match, seq: int) -> None:
        """An empty sequence gets what was found in the cells of another one."""
        if found.seq in self.tiers.parked:
            self.tiers.parked.move_to_end(found.seq)
        if found.n_cells:
            self._layout.give(found.seq, seq, found.n_cells)

    def _restore(self, seq: int, key: PrefixKey, n_tokens: int) -> int:
        """Append to a sequence what it lacks of the first `n_tokens`, which are saved. Returns how many it holds
        then."""
        n_now = self.cells.length(seq)
        if not self.make_room(n_tokens - n_now, in_pool=self._is_in_pool(seq)):
            return n_now
        if n_now and self._layout.can_share and not self._free and self.tiers.parked:
            self._vacate(next(iter(self.tiers.parked)))  # there has to be a spare sequence
        return self._copies.restore(seq, key, n_tokens, self._spare_of(seq))

    def _spare_of(self, seq: int) -> int | None:
        return self._layout.spare_of(seq, self._free)

    # --- what is kept of it --------------------------------------------------------------------------------------

    def _grow(self, seq: int, n_tokens: int) -> None:
        """Tell the tree about `n_tokens` of a sequence. In one pool, give back cells that duplicate another
        sequence's."""
        for same in self.tiers.tree.grow(seq, self._keys[seq], n_tokens):
            if isinstance(self._layout, OnePool):
                self._layout.same(same.seq, seq, same.start, same.end)

    def _is_warm(self, target: int, n_tokens: int, n_most: int, *, moves: bool = False) -> bool:
        """Whether so many tokens are copied to a sequence without a wait for memory, which has room for `n_most`. If
        not, a thread sees to it."""
        return self._is_quick(n_tokens) or self._backend.warm(target, n_most, moves=moves)

    def _is_quick(self, n_tokens: int) -> bool:
        """Whether copying `n_tokens` at once takes less time than a step can spare."""
        return n_tokens * self._backend.state_token_bytes <= QUICK_BYTES

    def _is_long_unsaved(self, seq: int) -> bool:
        """Whether much of a sequence would have to be saved before its cells are taken."""
        return seq in self.tiers.unsaved and not self._is_quick(self._copies.n_unsaved(seq))

    def _due(self) -> int | None:
        """The sequence that `save_next` takes next: the one parked first. None if it is not time yet."""
        unsaved = self.tiers.unsaved
        if not self._layout.can_share:
            return next(filter(self._can_touch, unsaved), None)
        if not unsaved:
            return None
        seq, n_placed = next(iter(unsaved.items()))
        if self._backend.n_gpu_layers:
            return seq if self.cells.n_free < self.cells.n_cells // SCARCE_PART else None
        if not self._running:
            return seq
        has_cost_s = (self.cells.n_placed - n_placed) * self.attend_s  # per token, as for the copies
        return seq if has_cost_s >= self.tiers.copy_s_per_token else None

    def _save_parked(self, seq: int, *, at_once: bool = True, leaves: bool = False) -> None:
        """Save a parked sequence, or a piece of it, unless that is already done. With `leaves` it then leaves its
        cells, in layouts where saved sequences should not take any."""
        is_saved = self._copies.save_parked(seq, self._spare_of(seq), at_once=at_once)
        if not is_saved or not leaves or isinstance(self._layout, Streams):
            return
        if self._layout.can_share or self._running:
            self._unpark(seq)
        else:
            self._saved.add(seq)

    def _vacate(self, seq: int) -> None:
        """Make sure that a sequence which does not run is empty: what is parked there moves out of its cells."""
        if seq in self.tiers.parked:
            self._save_parked(seq)
            self._unpark(seq)

    def _leave_pool(self, spare: int = -1) -> None:
        """Parked sequences that are saved, but for `spare`, leave the pool beside the streams: whoever runs there
        attends over their cells, too. Where no stream would wait for it, they are saved first. A GPU attends quickly.
        """
        if self._backend.n_gpu_layers:
            return
        has_streams = not all(map(self._is_in_pool, self._running))
        for seq in [seq for seq in self.tiers.parked if self._is_in_pool(seq) and seq != spare]:
            if not has_streams:
                self._save_parked(seq)
            if seq not in self.tiers.unsaved and not self._copies.n_unsaved(seq):
                self._unpark(seq)

    def _unpark(self, seq: int) -> None:
        self.tiers.unpark(seq)
        self._saved.discard(seq)
        self._clear(seq)

    def _clear(self, seq: int) -> None:
        """Empty a sequence and mark it as free."""
        self._layout.cut(seq, 0)
        self._layout.set_chunks(seq, ())
        self.tiers.tree.leave(seq)
        del self._keys[seq]
        self._free.add(seq)

    def _move(self, seq: int, target: int) -> None:
        assert isinstance(self._layout, Streams)
        self._vacate(target)
        self._layout.move(seq, target)
        n_tokens = self.tiers.tree.length(seq)
        self._running[target], self._keys[target] = self._running.pop(seq), self._keys[seq]
        self._free.discard(target)
        self._grow(target, n_tokens)
        self._clear(seq)

    # --- who may touch -------------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        """Whether the background computes."""
        return self._backend.worker is not None and self._backend.worker.is_busy

    def _is_in_pool(self, seq: int) -> bool:
        return seq >= self._layout.n_main

    def _can_touch(self, seq: int) -> bool:
        return not (self._is_busy and self._is_in_pool(seq))

    def _n_running_cells(self) -> int:
        """Cells that running sequences hold. In one pool, what the tree has of them may be shared; the rest is not."""
        lengths, tree = map(self.cells.length, self._running), self.tiers.tree
        if not self._layout.can_share:
            return sum(lengths)
        return tree.n_held(self._running.keys()) + sum(lengths) - sum(map(tree.length, self._running))
