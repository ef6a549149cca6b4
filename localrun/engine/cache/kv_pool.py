"""The pool for unified KV: sequence ids, cells, the prefix tree and saved states, kept in step with the backend.

Owner: the engine's main thread. What prompts have in common is shared: a cell may belong to several sequences. A
sequence id is *free*, *running* (a request owns it) or *parked* (a finished request left its prefix).

Every row of a step attends over the whole used span, empty cells and other people's included, so two things keep it
short. `settle` moves parked prefixes, one per step, out of the cells into the store, from where a later request gets
them back in about a hundredth of the time that computing them took: at once while nobody runs, else as soon as looking
at them has cost the running ones as much as the copies take. One too large for the store stays until its cells are
needed, and on a GPU, which reads cells quickly, they all do. `compact` moves what lies behind a hole into it, a piece
at a time.

Invariant: for every sequence, backend, `cells` and tree agree on its tokens (`check_integrity`).
Does not: decide who runs (`scheduler.py`) or read a clock.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from localrun.engine.backend import Backend
from localrun.engine.cache.kv_cells import KvCells
from localrun.engine.cache.pool import Lease
from localrun.engine.cache.prefix_tree import PrefixTree
from localrun.engine.cache.segments import Path
from localrun.engine.cache.state_keeper import GAIN_TOKENS, StateKeeper

# A span this much longer than the cells in use is worth moving something for: the moves take as long as a few steps
# lose by it.
COMPACT_RATIO, COMPACT_CELLS = 1.5, 1024
# One move, which streams wait for; fewer than the holes have room for.
MOVE_TOKENS = 512
# How far apart two positions are whose rows tell what a row pays for a cell that it looks at.
_DEPTH_TOKENS = 1024


class KvPool:
    """See the module and `pool.Pool`."""

    def __init__(self, backend: Backend, keeper: StateKeeper) -> None:
        self.cells = KvCells(backend.n_cells, backend.n_seqs)
        self.store = keeper.store
        self._backend = backend
        self._keeper = keeper
        self._keeps_parked = backend.n_gpu_layers > 0
        self._tree = PrefixTree()
        self._free = list(reversed(range(backend.n_seqs)))
        self._parked: OrderedDict[int, None] = OrderedDict()
        # Prefixes to be saved, with the rows that had been placed when they were parked.
        self._unsettled: dict[int, int] = {}
        self._running: set[int] = set()

    @property
    def n_cached_sequences(self) -> int:
        return len(self._parked) + len(self.store)

    @property
    def can_settle(self) -> bool:
        return self._due() is not None

    def match(self, tokens: list[int]) -> int:
        limit = len(tokens) - 1
        return max(self._tree.match(tokens, limit).n_tokens, self.store.match(tokens, limit).n_tokens)

    def follow(self, seq: int, tokens: list[int], n_matched: int) -> bool:
        return True  # whatever `seq` computes can be shared at once

    def n_obtainable(self, tokens: list[int]) -> int:
        shared = self._tree.match(tokens, len(tokens) - 1, among=self._running)
        return self.cells.n_cells - self._n_running_cells() + shared.n_tokens

    def acquire(self, tokens: list[int]) -> Lease | None:
        if not self._free and not self._evict_parked():
            return None
        seq = self._free.pop()
        self._running.add(seq)
        limit = len(tokens) - 1
        stored = self.store.match(tokens, limit)
        if stored.n_tokens >= self._tree.match(tokens, limit).n_tokens + GAIN_TOKENS:
            n_tokens = self._restore(seq, stored)
            if n_tokens:
                self.publish(seq, tokens[:n_tokens])
                return Lease(seq, n_tokens)
        live = self._tree.match(tokens, limit)  # after making room, which may have evicted the donor
        if live.holder is not None:
            if live.holder in self._parked:
                self._parked.move_to_end(live.holder)
            self._share(live.holder, seq, live.n_tokens)
            self.publish(seq, tokens[: live.n_tokens])
        return Lease(seq, live.n_tokens)

    def next_stop(self, seq: int, n_computed: int) -> int | None:
        return None

    def make_room(self, n_cells: int) -> bool:
        while self.cells.n_free < n_cells:
            if not self._evict_parked():
                return False
        return True

    def publish(self, seq: int, tokens: list[int]) -> None:
        """Cells that another sequence has too are given back."""
        for copy in self._tree.insert(seq, tokens):
            if self.cells.cells_of(seq)[copy.start] == self.cells.cells_of(copy.holder)[copy.start]:
                continue  # already the same cells
            if self._backend.seq_remove(seq, copy.start, copy.end):
                self._backend.seq_share(copy.holder, seq, copy.start, copy.end)
                self.cells.swap(copy.holder, seq, copy.start, copy.end)

    def rewind(self, seq: int, n_tokens: int) -> int:
        self._backend.seq_remove(seq, n_tokens)
        return n_tokens

    def release(self, seq: int, tokens: list[int]) -> None:
        self.publish(seq, tokens)
        self._running.remove(seq)
        if not tokens:
            self._free.append(seq)
            return
        self._parked[seq] = None
        if self._keeper.is_worth_saving(tokens):
            self._unsettled[seq] = self.cells.n_placed
        elif self.store.is_on and not self._keeps_parked:
            self._unpark(seq)

    def forget(self, seq: int) -> None:
        self._running.remove(seq)
        self._clear(seq)

    def settle(self) -> None:
        seq = self._due()
        if seq is not None:
            self._settle(seq)

    def retire(self) -> None:
        for seq in list(self._unsettled):
            self._settle(seq)

    def clear(self, *, ram: bool, disk: bool) -> None:
        self.store.clear(ram=ram, disk=disk)
        if ram:
            for seq in list(self._parked):
                self._unpark(seq)

    def bring_home(self, seq: int) -> int:
        return seq

    def compact(self) -> tuple[int, int] | None:
        """Move what lies in the highest cell, and what lies before it in the same sequences, into the lowest free
        cells. Sequences keep their numbers, and what they share."""
        cells, backend = self.cells, self._backend
        if cells.span <= COMPACT_RATIO * cells.n_used + COMPACT_CELLS:
            return None
        if not self._free:
            self._evict_parked()  # the next call has a spare sequence
            return None
        seqs, start, end = cells.held_alike(cells.span - 1, MOVE_TOKENS)
        spare = self._free[-1]
        backend.seq_share(seqs[0], spare, start, end)
        (data,) = backend.state_slices(spare, [(start, end)])
        for seq in (spare, *seqs):
            backend.seq_remove(seq, start, end)
        if not backend.state_set(spare, backend.state_join(spare, [(data, start, start, end)])):
            raise RuntimeError(f"positions [{start}, {end}) were refused by the cells that they came from")
        for seq in seqs:
            backend.seq_share(spare, seq, start, end)
        backend.seq_remove(spare, 0)
        cells.move(seqs, start, end)
        return None

    def check_integrity(self) -> None:
        self.cells.check_integrity()
        self._tree.check_integrity()
        self.store.check_integrity()
        groups = [set(self._free), set(self._parked), self._running]
        assert sum(map(len, groups)) == len(set().union(*groups)) == self._backend.n_seqs, (
            "a sequence id is lost or double"
        )
        for seq in self._free:
            assert self.cells.length(seq) == 0, f"free sequence {seq} holds cells"
            assert self._tree.length(seq) == 0, f"free sequence {seq} is in the tree"
        for seq in self._parked:
            assert self.cells.length(seq) == self._tree.length(seq), f"parked sequence {seq} is not all in the tree"
        for seq in self._running:
            assert self.cells.length(seq) >= self._tree.length(seq), f"the tree promises more of {seq} than there is"
        held = {cell for seq in self._running for cell in self.cells.cells_of(seq).tolist()}
        assert self._n_running_cells() == len(held), "cells of running sequences are counted twice or not at all"
        assert self._unsettled.keys() <= self._parked.keys(), "a prefix is to be moved that is not parked"

    def _n_running_cells(self) -> int:
        """Cells that running sequences hold: what the tree has of them is shared, what is not there yet is not."""
        n_unpublished = sum(self.cells.length(seq) - self._tree.length(seq) for seq in self._running)
        return self._tree.n_held(self._running) + n_unpublished

    def _share(self, source: int, target: int, n_tokens: int) -> None:
        self._backend.seq_share(source, target, 0, n_tokens)
        self.cells.share(source, target, 0, n_tokens)

    def _restore(self, seq: int, path: Path) -> int:
        """Bring a saved path into an empty sequence. Returns how many tokens it holds then."""
        if not self.make_room(path.n_tokens):
            return 0
        n_tokens = self._keeper.restore(seq, path)
        self.cells.restore(seq, np.arange(n_tokens, dtype=np.int32))
        return n_tokens

    def _due(self) -> int | None:
        """The sequence that `settle` takes next: the one parked first, if it is time."""
        if not self._unsettled or self._keeps_parked:
            return None
        seq, n_placed = next(iter(self._unsettled.items()))
        if not self._running:
            return seq
        attend_s = (self.store.recompute_s(_DEPTH_TOKENS, 1) - self.store.recompute_s(0, 1)) / _DEPTH_TOKENS
        has_cost_s = (self.cells.n_placed - n_placed) * attend_s  # for each token, as the copies
        return seq if has_cost_s >= self._keeper.copy_s_per_token else None

    def _settle(self, seq: int) -> None:
        del self._unsettled[seq]
        if self._keeper.save(seq, self._tree.tokens(seq)):
            self._unpark(seq)

    def _evict_parked(self) -> bool:
        """Move the least recently used parked prefix out of the cells. False if there is none."""
        if not self._parked:
            return False
        seq = next(iter(self._parked))
        if seq in self._unsettled:
            self._keeper.save(seq, self._tree.tokens(seq))
        self._unpark(seq)
        return True

    def _unpark(self, seq: int) -> None:
        del self._parked[seq]
        self._unsettled.pop(seq, None)
        self._clear(seq)

    def _clear(self, seq: int) -> None:
        self._backend.seq_remove(seq, 0)
        self.cells.truncate(seq, 0)
        self._tree.remove(seq)
        self._free.append(seq)
