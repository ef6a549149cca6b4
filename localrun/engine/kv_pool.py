"""The KV pool: sequence ids, cells, the prefix tree and saved states, kept in step with the backend.

Owner: the engine's main thread. A sequence id is *free*, *running* (a request owns it) or *parked* (a finished request
left its prefix). Every row of a step attends over the whole used span, so parked prefixes slow everybody: `settle`
moves them, one per step, out of the cells into memory, from where a later request gets them back in about a hundredth
of the time that computing them took. A prefix too large for the memory allowed stays until its cells are needed.

Invariant: for every sequence, backend, `cells` and tree agree on its tokens (`check_integrity`).
Does not: decide who runs (`scheduler.py`) or read a clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from localrun.engine.backend import Backend
from localrun.engine.kv_cells import KvCells
from localrun.engine.kv_store import KvStore, SavedState
from localrun.engine.prefix_tree import Match, PrefixTree

# A saved state is restored whole and then cut; below this gain over the live match the copy costs more than it saves.
RESTORE_GAIN_TOKENS = 16


@dataclass(frozen=True)
class Lease:
    """A sequence for a request, with the tokens that the cache already gave."""

    seq: int
    n_cached: int


class KvPool:
    """See the module."""

    def __init__(self, backend: Backend, *, ram_cache_bytes: int) -> None:
        self.cells = KvCells(backend.n_cells, backend.n_seqs)
        self.store = KvStore(ram_cache_bytes)
        self._backend = backend
        self._tree = PrefixTree()
        self._free = list(reversed(range(backend.n_seqs)))
        self._parked: OrderedDict[int, None] = OrderedDict()
        self._unsettled: deque[int] = deque()
        self._running: set[int] = set()

    @property
    def n_cached_sequences(self) -> int:
        """Prefixes kept for later: parked in cells or saved in memory."""
        return len(self._parked) + len(self.store)

    @property
    def can_settle(self) -> bool:
        """Whether there is a parked prefix that `settle` has not looked at."""
        return bool(self._unsettled)

    def match(self, tokens: list[int]) -> int:
        """How many leading tokens an `acquire` would get without computing. The last token is never among them."""
        live, stored = self._matches(tokens)
        return max(live.n_tokens, stored.n_tokens)

    def n_obtainable(self, tokens: list[int]) -> int:
        """Cells that a request for `tokens` could have if everything parked had to go, shared ones included."""
        held = np.zeros(self.cells.n_cells, bool)
        for seq in self._running:
            held[self.cells.cells_of(seq)] = True
        shared = self._tree.match(tokens, len(tokens) - 1, among=self._running)
        return self.cells.n_cells - int(np.count_nonzero(held)) + shared.n_tokens

    def acquire(self, tokens: list[int]) -> Lease | None:
        """A sequence that already holds as much of `tokens` as the cache has. None if no sequence id is left."""
        if not self._free and not self._evict_parked():
            return None
        seq = self._free.pop()
        self._running.add(seq)
        live, stored = self._matches(tokens)
        if stored.holder is not None and stored.n_tokens >= live.n_tokens + RESTORE_GAIN_TOKENS:
            if self._restore(seq, stored.holder, stored.n_tokens):
                self.publish(seq, tokens[: stored.n_tokens])
                return Lease(seq, stored.n_tokens)
            live, _ = self._matches(tokens)  # making room may have evicted the donor
        if live.holder is not None:
            self._touch(live.holder)
            self._backend.seq_share(live.holder, seq, 0, live.n_tokens)
            self.cells.share(live.holder, seq, 0, live.n_tokens)
            self.publish(seq, tokens[: live.n_tokens])
        return Lease(seq, live.n_tokens)

    def make_room(self, n_cells: int) -> bool:
        """Free cells by moving parked prefixes out, least recently used first. False if that is not enough."""
        while self.cells.n_free < n_cells:
            if not self._evict_parked():
                return False
        return True

    def publish(self, seq: int, tokens: list[int]) -> None:
        """The cells of a running sequence hold `tokens`: others may share them from now on. Cells that another
        sequence has too are given back."""
        for copy in self._tree.insert(seq, tokens):
            if self.cells.cells_of(seq)[copy.start] == self.cells.cells_of(copy.holder)[copy.start]:
                continue  # already the same cells
            if self._backend.seq_remove(seq, copy.start, copy.end):
                self._backend.seq_share(copy.holder, seq, copy.start, copy.end)
                self.cells.swap(copy.holder, seq, copy.start, copy.end)

    def release(self, seq: int, tokens: list[int]) -> None:
        """A request is done with its sequence, whose cells hold `tokens`: they stay as a parked prefix."""
        self.publish(seq, tokens)
        self._running.remove(seq)
        if not tokens:
            self._free.append(seq)
            return
        self._parked[seq] = None
        if self.store.limit_bytes:
            self._unsettled.append(seq)

    def forget(self, seq: int) -> None:
        """Drop a running sequence and everything in its cells, after a failed step."""
        self._running.remove(seq)
        self._clear(seq)

    def settle(self) -> None:
        """Move one parked prefix to memory, if it is not too large for it."""
        if not self._unsettled:
            return
        seq = self._unsettled.popleft()
        if self._save(seq):
            self._unpark(seq)

    def check_integrity(self) -> None:
        """Raises AssertionError where ids, cells, tree and store disagree."""
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
        assert set(self._unsettled) <= set(self._parked), "a prefix is to be moved that is not parked"
        assert len(self._tree.holders(stored=True)) == len(self.store), "tree and store differ"

    def _matches(self, tokens: list[int]) -> tuple[Match, Match]:
        """The longest live and the longest stored prefix, leaving the last token to be computed."""
        limit = len(tokens) - 1
        return self._tree.match(tokens, limit), self._tree.match(tokens, limit, stored=True)

    def _restore(self, seq: int, entry: int, n_tokens: int) -> bool:
        """Bring a saved state back into an empty sequence and cut it to `n_tokens`."""
        state = self.store.get(entry)  # held from here on: what makes room may push it out of the store
        if not self.make_room(state.order.size):
            return False
        if not self._backend.state_set(seq, state.data):
            if self._tree.length(entry, stored=True):
                self._forget_entry(entry)
            return False
        self.cells.restore(seq, state.order)
        if self._backend.seq_remove(seq, n_tokens):
            self.cells.truncate(seq, n_tokens)
            return True
        self._backend.seq_remove(seq, 0)
        self.cells.truncate(seq, 0)
        return False

    def _evict_parked(self) -> bool:
        """Move the least recently used parked prefix out of the cells. False if there is none."""
        if not self._parked:
            return False
        seq = next(iter(self._parked))
        self._save(seq)
        self._unpark(seq)
        return True

    def _unpark(self, seq: int) -> None:
        del self._parked[seq]
        if seq in self._unsettled:
            self._unsettled.remove(seq)
        self._clear(seq)

    def _save(self, seq: int) -> bool:
        """Keep a sequence in memory, if it is not there already. False if it is too large."""
        cover = self._tree.stored_cover(seq)
        if cover is not None:
            self.store.get(cover)  # counts as a use
            return True
        order = self.cells.saved_order(seq)
        data = self._backend.state_get(seq, limit_bytes=self.store.limit_bytes - order.nbytes)
        if data is None:
            return False
        # What this state covers goes first, or it would push out states that nothing else covers.
        for old in self._tree.superseded(seq):
            self._forget_entry(old)
        entry, evicted = self.store.put(SavedState(data, order))
        for old in evicted:
            self._tree.remove(old, stored=True)
        self._tree.insert(entry, self._tree.tokens(seq), stored=True)
        return True

    def _forget_entry(self, entry: int) -> None:
        self.store.drop(entry)
        self._tree.remove(entry, stored=True)

    def _touch(self, seq: int) -> None:
        if seq in self._parked:
            self._parked.move_to_end(seq)

    def _clear(self, seq: int) -> None:
        self._backend.seq_remove(seq, 0)
        self.cells.truncate(seq, 0)
        self._tree.remove(seq)
        self._free.append(seq)
