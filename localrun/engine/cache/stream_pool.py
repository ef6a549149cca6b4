"""The pool for split KV: every sequence has a stream of cells of its own.

Owner: the engine's main thread. Rows attend over their own stream alone, so unrelated requests cost each other nothing
and idle prefixes may stay where they are. What prompts have in common is copied, not shared: from a parked sequence by
staying in it, from a running one or from the store by a copy, about a hundredth of the time that computing it takes.

Sequences from `Backend.n_seqs` on are the *background's*: a request with a long way to go begins there, is computed
beside the steps, and comes home to a stream among the others when its prompt is done (`bring_home`). While the
background is busy, its sequences cannot be touched.

The library computes neighbouring streams together and makes a pass of its own for every gap between them, so running
sequences are kept at the lowest numbers: `compact` moves one when there is a hole.

A sequence id is *free*, *running* (a request owns it) or *parked* (it holds a finished request's tokens, until its
stream is needed). `settle` saves parked ones to the store, one per call, so that no newcomer waits for it.

Invariant: for every sequence, backend and books agree on its tokens (`check_integrity`).
Does not: decide who runs, or serve a request that is longer than a stream: the engine changes to one pool for that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from localrun.engine.backend import Backend
from localrun.engine.cache.pool import UNCOUNTED, Lease
from localrun.engine.cache.prefix_tree import common_prefix
from localrun.engine.cache.state_keeper import GAIN_TOKENS, StateKeeper
from localrun.engine.cache.stream_cells import StreamCells


class StreamPool:
    """See the module and `pool.Pool`. `takes` says whether a request with so many new tokens is computed in the
    background."""

    def __init__(self, backend: Backend, keeper: StateKeeper, takes: Callable[[int], bool]) -> None:
        self._background = backend.background
        n_away = self._background.n_seqs if self._background else 0
        self.cells = StreamCells(backend.n_cells // backend.n_seqs, backend.n_seqs, n_away)
        self.store = keeper.store
        self._backend = backend
        self._keeper = keeper
        self._takes = takes
        self._n_ids = backend.n_seqs + n_away
        self._free = set(range(self._n_ids))
        self._parked: OrderedDict[int, list[int]] = OrderedDict()
        self._running: dict[int, list[int]] = {}
        self._published: dict[int, int] = {}
        self._unsettled: set[int] = set()

    @property
    def n_cached_sequences(self) -> int:
        return len(self._parked) + len(self.store)

    @property
    def can_settle(self) -> bool:
        return any(map(self._can_touch, self._unsettled))

    def match(self, tokens: list[int]) -> int:
        limit = len(tokens) - 1
        live = max((n for n, _ in self._live(tokens, limit)), default=0)
        return max(live, self.store.match(tokens, limit).n_tokens)

    def follow(self, seq: int, tokens: list[int], n_matched: int) -> bool:
        shared = common_prefix(self._running[seq], tokens, 0, len(tokens) - 1)
        return shared - max(n_matched, self._published[seq]) >= GAIN_TOKENS

    def n_obtainable(self, tokens: list[int]) -> int:
        return UNCOUNTED  # a stream of its own, whatever the others hold

    def acquire(self, tokens: list[int]) -> Lease | None:
        limit = len(tokens) - 1
        live = self._live(tokens, limit)
        n_live, donor = max(live, key=lambda held: (held[0], held[1] in self._parked), default=(0, -1))
        n_stored = self.store.match(tokens, limit).n_tokens
        is_away = not self._is_background_busy and self._takes(len(tokens) - max(n_live, n_stored))
        if donor in self._parked and n_live >= n_stored and is_away == self._is_away(donor):
            return self._reuse(donor, tokens, n_live)
        seq = self._empty_stream(is_away=is_away, spare=donor)
        if seq is None:
            return None
        if donor in self._free:  # its stream was the only one to be had
            n_live = 0
        self._free.discard(seq)
        self._running[seq] = tokens
        n_cached = self._bring(seq, tokens, limit, donor, n_live)
        self.cells.set(seq, n_cached)
        self._published[seq] = n_cached
        return Lease(seq, n_cached)

    def next_stop(self, seq: int, n_computed: int) -> int | None:
        return None

    def make_room(self, n_cells: int) -> bool:
        return True

    def publish(self, seq: int, tokens: list[int]) -> None:
        self._published[seq] = len(tokens)

    def rewind(self, seq: int, n_tokens: int) -> int:
        self._backend.seq_remove(seq, n_tokens)
        self.cells.set(seq, n_tokens)
        self._published[seq] = min(self._published[seq], n_tokens)
        return n_tokens

    def release(self, seq: int, tokens: list[int]) -> None:
        del self._running[seq], self._published[seq]
        if not tokens:
            self._clear(seq)
            return
        self._parked[seq] = tokens
        if self._keeper.is_worth_saving(tokens):
            self._unsettled.add(seq)

    def forget(self, seq: int) -> None:
        del self._running[seq], self._published[seq]
        self._clear(seq)

    def settle(self) -> None:
        seq = max(filter(self._can_touch, self._unsettled), default=None)
        if seq is not None:
            self._settle(seq)

    def retire(self) -> None:
        for seq in list(self._unsettled):
            self._settle(seq)

    def clear(self, *, ram: bool, disk: bool) -> None:
        self.store.clear(ram=ram, disk=disk)
        if ram:
            for seq in list(filter(self._can_touch, self._parked)):
                self._unsettled.discard(seq)
                del self._parked[seq]
                self._clear(seq)

    def bring_home(self, seq: int) -> int:
        """Move a sequence of the background to a stream among the others. Returns its number there."""
        target = self._empty_stream(is_away=False, spare=-1)
        assert target is not None, "more requests than streams"
        self._move(seq, target)
        return target

    def compact(self) -> tuple[int, int] | None:
        """Move the running sequence with the highest number into the lowest hole. Returns both numbers, if there was
        one."""
        running = [seq for seq in self._running if not self._is_away(seq)]
        hole = next((seq for seq in range(len(running)) if seq not in self._running), None)
        if hole is None:
            return None
        seq = max(running)
        if hole in self._parked:
            self._evict(hole)
        self._move(seq, hole)
        return seq, hole

    def check_integrity(self) -> None:
        self.store.check_integrity()
        ids = [*self._free, *self._parked, *self._running]
        assert sorted(ids) == list(range(self._n_ids)), "a sequence id is lost or double"
        for seq in self._free:
            assert self.cells.length(seq) == 0, f"free sequence {seq} holds cells"
        for seq, tokens in self._parked.items():
            assert self.cells.length(seq) == len(tokens), f"parked sequence {seq} holds other tokens than it should"
        for seq, tokens in self._running.items():
            assert self._published[seq] <= self.cells.length(seq) <= len(tokens), f"sequence {seq} promises too much"
        assert self._published.keys() == self._running.keys(), "a promise of a sequence that does not run"
        assert self._unsettled <= self._parked.keys(), "a prefix is to be saved that is not parked"

    @property
    def _is_background_busy(self) -> bool:
        return self._background is not None and self._background.is_busy

    def _is_away(self, seq: int) -> bool:
        return seq >= self._backend.n_seqs

    def _can_touch(self, seq: int) -> bool:
        return not (self._is_background_busy and self._is_away(seq))

    def _live(self, tokens: list[int], limit: int) -> list[tuple[int, int]]:
        """What sequences hold of `tokens[:limit]`, as (tokens, sequence), where it is worth a copy."""
        found = [(common_prefix(held, tokens, 0, limit), seq) for seq, held in self._parked.items()]
        for seq, held in self._running.items():
            found.append((common_prefix(held, tokens, 0, min(limit, self._published[seq])), seq))
        return [(n_tokens, seq) for n_tokens, seq in found if n_tokens >= GAIN_TOKENS and self._can_touch(seq)]

    def _reuse(self, seq: int, tokens: list[int], n_tokens: int) -> Lease:
        """Go on in a parked sequence. What it holds beyond the common beginning is saved first."""
        if n_tokens < len(self._parked[seq]):
            self._settle(seq)
            self._backend.seq_remove(seq, n_tokens)
        self._unsettled.discard(seq)
        del self._parked[seq]
        self._running[seq] = tokens
        self._published[seq] = n_tokens
        self.cells.set(seq, n_tokens)
        return Lease(seq, n_tokens)

    def _bring(self, seq: int, tokens: list[int], limit: int, donor: int, n_live: int) -> int:
        """Fill an empty sequence with what the cache has of `tokens`. Returns how many tokens that is."""
        path = self.store.match(tokens, limit)
        if n_live >= path.n_tokens + GAIN_TOKENS:
            if self._keeper.is_worth_saving(tokens[:n_live]):
                self._keeper.save(donor, tokens[:n_live])  # others will want it, too
                path = self.store.match(tokens, limit)
            if path.n_tokens < n_live - GAIN_TOKENS:
                return n_live if self._keeper.copy(donor, seq, n_live) else 0
        return self._keeper.restore(seq, path) if path.n_tokens >= GAIN_TOKENS else 0

    def _move(self, seq: int, target: int) -> None:
        """A running sequence goes to an empty stream."""
        n_tokens = self.cells.length(seq)
        if n_tokens and not self._backend.seq_copy(seq, target):
            raise RuntimeError(f"stream {target} refused the state of stream {seq}")
        self._free.discard(target)
        self._running[target] = self._running.pop(seq)
        self._published[target] = self._published.pop(seq)
        self.cells.set(target, n_tokens)
        self._clear(seq)

    def _empty_stream(self, *, is_away: bool, spare: int) -> int | None:
        """The lowest free sequence, else the one that was parked first; `spare` only if there is no other."""
        free = [seq for seq in self._free if self._is_away(seq) == is_away]
        if free:
            return min(free)
        parked = [seq for seq in self._parked if self._is_away(seq) == is_away]
        if not parked:
            return None
        seq = next((seq for seq in parked if seq != spare), spare)
        self._evict(seq)
        return seq

    def _evict(self, seq: int) -> None:
        self._settle(seq)
        del self._parked[seq]
        self._clear(seq)

    def _settle(self, seq: int) -> None:
        """Save a parked sequence, if it is not saved yet."""
        if seq in self._unsettled:
            self._unsettled.remove(seq)
            self._keeper.save(seq, self._parked[seq])

    def _clear(self, seq: int) -> None:
        self._backend.seq_remove(seq, 0)
        self.cells.set(seq, 0)
        self._free.add(seq)
