"""The pool for models whose memory of a sequence is whole or nothing: sliding windows, recurrent and hybrid layers.

Owner: the engine's main thread. Such a state cannot be cut back to a common beginning, so nothing is shared live.
Instead the whole state is saved as a *checkpoint* where a later prompt is likely to part from this one or to go on:
after the first message (the system prompt, which conversations share), after the last two that the prompt holds (an
edited or dropped answer), where it parts from an earlier prompt (what two have in common a third may have too), before
its last token (the same prompt again), and at the end of the request (the next turn). A step ends exactly at a
checkpoint (`next_stop`), and there is none where computing the tokens since the one before is faster than the copy. A
new request starts from the longest checkpoint that its tokens begin with.

Two prompts with the same beginning, there at once: the second waits for the first one's next checkpoint inside the
common part, and if none is planned there, one is added where they part (`follow`). So models whose template has no
separate system message share it too.

Of one conversation the first checkpoint is kept, the last few, and those that several requests started from; each for
itself, for they hang at the root of the store and none needs another.

A finished sequence is *parked*, and a request that continues it goes on in it, without a copy. `settle`, one per step,
saves it: eight that end together would otherwise stop everybody for eight copies. What was saved keeps its cells only
while nothing runs, for every row would attend over them; what is too large for the store keeps them until they are
needed.

Invariant: every sequence id is free, running or parked; `cells` counts what the backend holds.
Does not: decide who runs (`scheduler.py`) or which checkpoint goes when memory is short (`kv_store.py`).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from localrun.engine.backend import Backend
from localrun.engine.cache.kv_cells import KvCells
from localrun.engine.cache.kv_store import KvStore
from localrun.engine.cache.pool import Lease
from localrun.engine.cache.prefix_tree import common_prefix
from localrun.engine.cache.segments import Path, Segment

# Checkpoints keep this distance, however fast copies are: a step that ends early costs something too.
CHECKPOINT_GAP_TOKENS = 32
# Of one conversation: the first, and the longest ones (its end, the last prompt, the message before).
KEPT_CHECKPOINTS = 4
# The next turn of a conversation starts from its last state once. What was started from more often is a fork.
FORK_STARTS = 2
_MEMORY = 0.2  # weight of the latest measurement


@dataclass
class _Run:
    """A running sequence: its request's tokens, how many are computed, and where steps must end, in order."""

    tokens: list[int]
    n_computed: int
    stops: list[int]


class StatePool:
    """See the module and `pool.Pool`."""

    def __init__(self, backend: Backend, store: KvStore, clock: Callable[[], float]) -> None:
        self.cells = KvCells(backend.n_cells, backend.n_seqs)
        self.store = store
        self._backend = backend
        self._clock = clock
        self._save_s = 0.0
        self._restore_s = 0.0
        self._starts: WeakKeyDictionary[Segment, int] = WeakKeyDictionary()
        self._free = list(reversed(range(backend.n_seqs)))
        self._running: dict[int, _Run] = {}
        self._parked: OrderedDict[int, list[int]] = OrderedDict()
        self._unsettled: deque[int] = deque()
        self._saved: set[int] = set()

    @property
    def n_cached_sequences(self) -> int:
        return len(self._parked) - len(self._saved) + len(self.store)

    @property
    def can_settle(self) -> bool:
        return bool(self._unsettled)

    def match(self, tokens: list[int]) -> int:
        return max(self._parked_beginning(tokens)[0], self._stored_tokens(tokens))

    def follow(self, seq: int, tokens: list[int], n_matched: int) -> bool:
        run = self._running[seq]
        shared = common_prefix(run.tokens, tokens, 0, len(tokens) - 1)
        if run.n_computed >= shared or not self._pays(n_matched, shared):
            return False
        if not any(max(n_matched, run.n_computed) < stop <= shared for stop in run.stops):
            insort(run.stops, shared)
        return True

    def n_obtainable(self, tokens: list[int]) -> int:
        return self.cells.n_cells - sum(map(self.cells.length, self._running))

    def acquire(self, tokens: list[int]) -> Lease | None:
        n_cached, seq = self._parked_beginning(tokens)
        goes_on = n_cached > 0 and n_cached >= self._stored_tokens(tokens)
        if goes_on:
            if seq in self._unsettled:
                self._save(seq, self._parked[seq])  # another request may part from here
            self._leave(seq)
            saved_too = self.store.match(tokens, n_cached, whole=True)
            if saved_too.n_tokens == n_cached:
                self._note_start(saved_too)
        for saved in list(self._saved):
            self._unpark(saved)
        if not goes_on:
            if not self._free and not self._evict_parked():
                return None
            seq = self._free.pop()
            n_cached = self._restore(seq, tokens, len(tokens) - 1)
        self._running[seq] = _Run(tokens, n_cached, self._stops(tokens, n_cached))
        return Lease(seq, n_cached)

    def next_stop(self, seq: int, n_computed: int) -> int | None:
        stops = self._running[seq].stops
        at = bisect_right(stops, n_computed)
        return stops[at] if at < len(stops) else None

    def make_room(self, n_cells: int) -> bool:
        while self.cells.n_free < n_cells:
            if not self._evict_parked():
                return False
        return True

    def publish(self, seq: int, tokens: list[int]) -> None:
        run = self._running[seq]
        run.n_computed = len(tokens)
        if run.n_computed in run.stops:
            self._save(seq, tokens)

    def rewind(self, seq: int, n_tokens: int) -> int:
        if self._backend.seq_remove(seq, n_tokens):
            return n_tokens
        run = self._running[seq]
        self._empty(seq)
        run.n_computed = self._restore(seq, run.tokens, n_tokens)
        return run.n_computed

    def release(self, seq: int, tokens: list[int]) -> None:
        del self._running[seq]
        if not tokens:
            self._empty(seq)
            self._free.append(seq)
            return
        self._parked[seq] = tokens
        if self.store.is_on:
            self._unsettled.append(seq)

    def forget(self, seq: int) -> None:
        del self._running[seq]
        self._empty(seq)
        self._free.append(seq)

    def settle(self) -> None:
        if not self._unsettled:
            return
        seq = self._unsettled.popleft()
        if self._save(seq, self._parked[seq]):
            self._saved.add(seq)
            if self._running:
                self._unpark(seq)

    def bring_home(self, seq: int) -> int:
        return seq

    def compact(self) -> tuple[int, int] | None:
        return None

    def retire(self) -> None:
        while self.can_settle:
            self.settle()

    def clear(self, *, ram: bool, disk: bool) -> None:
        if ram:
            self._unsettled.clear()
            for seq in list(self._parked):
                self._unpark(seq)
        self.store.clear(ram=ram, disk=disk)

    def check_integrity(self) -> None:
        self.cells.check_integrity()
        self.store.check_integrity()
        ids = [*self._free, *self._parked, *self._running]
        assert len(ids) == len(set(ids)) == self._backend.n_seqs, "a sequence id is lost or double"
        for seq in self._free:
            assert self.cells.length(seq) == 0, f"free sequence {seq} holds cells"
        for seq, tokens in self._parked.items():
            assert self.cells.length(seq) == len(tokens), f"parked sequence {seq} holds other tokens than it should"
        assert self._saved.isdisjoint(self._unsettled), "a sequence is to be saved that is saved"
        assert self._saved | set(self._unsettled) <= self._parked.keys(), "a sequence is to be saved that is not parked"
        assert not (self._saved and self._running), "rows attend over what is saved"
        for seq, run in self._running.items():
            assert self.cells.length(seq) >= run.n_computed, f"sequence {seq} holds less than it published"
            assert run.stops == sorted(set(run.stops)), f"the stops of sequence {seq} are out of order"

    def _stops(self, tokens: list[int], n_cached: int) -> list[int]:
        """Where to save a state on the way through a prompt of which `n_cached` tokens are there."""
        last = len(tokens) - 1
        ends = [at for at, token in enumerate(tokens[:last], 1) if token in self._backend.eog_tokens]
        parting = self.store.match(tokens, last).n_tokens
        # What comes after the last message's end is a few words of the template: one checkpoint there is enough.
        wanted = {*ends[:1], parting, *(end for end in ends[-2:] if last - end >= CHECKPOINT_GAP_TOKENS), last}
        stops: list[int] = []
        for stop in sorted(wanted):
            if self._pays(stops[-1] if stops else n_cached, stop):
                stops.append(stop)
        return stops

    def _pays(self, start: int, end: int) -> bool:
        """Whether a checkpoint at `end` is worth its copies, given one at `start`."""
        if not self.store.is_on or end - start < CHECKPOINT_GAP_TOKENS:
            return False
        return self.store.recompute_s(start, end - start) >= self._save_s + self._restore_s

    def _stored_tokens(self, tokens: list[int]) -> int:
        return self.store.match(tokens, len(tokens) - 1, whole=True).n_tokens

    def _parked_beginning(self, tokens: list[int]) -> tuple[int, int]:
        """The longest parked sequence that a request for `tokens` continues, as (tokens, sequence); (0, -1): none."""
        begun = [
            (len(parked), seq)
            for seq, parked in self._parked.items()
            if len(parked) < len(tokens) and parked[-1] == tokens[len(parked) - 1] and parked == tokens[: len(parked)]
        ]
        return max(begun, default=(0, -1))

    def _restore(self, seq: int, tokens: list[int], limit: int) -> int:
        """Bring the longest checkpoint of `tokens[:limit]` into an empty sequence. Returns its length; 0: none."""
        while (path := self.store.match(tokens, limit, whole=True)).n_tokens:
            segment = path.segments[-1]
            if not self.make_room(path.n_tokens):
                return 0
            began_s = self._clock()
            data = self.store.load(segment)
            state = data if data is None or isinstance(data, bytearray) else bytearray(data)
            if state is not None and self._backend.state_set(seq, state):
                self.cells.restore(seq, segment.order)
                self._note_start(path)
                self._restore_s = _blend(self._restore_s, self._clock() - began_s)
                return path.n_tokens
            if data is not None:
                self.store.drop(segment)
        return 0

    def _note_start(self, path: Path) -> None:
        """A request goes on from the checkpoint at the end of a path."""
        self.store.touch(path)
        segment = path.segments[-1]
        self._starts[segment] = self._starts.get(segment, 0) + 1

    def _save(self, seq: int, tokens: list[int]) -> bool:
        """Keep the state of a sequence, which holds `tokens`, unless a checkpoint shortly before it is as good. False
        if it does not fit."""
        path = self.store.match(tokens, len(tokens), whole=True)
        if not self._pays(path.n_tokens, len(tokens)):
            self.store.touch(path)
            if len(tokens) - path.n_tokens >= CHECKPOINT_GAP_TOKENS:
                # One slow copy is not held against all that follow: sooner or later one is tried again.
                self._save_s *= 1 - _MEMORY
                self._restore_s *= 1 - _MEMORY
            return True
        began_s = self._clock()
        data = self._backend.state_get(seq, limit_bytes=self.store.limit_bytes or self.store.most_bytes)
        if data is None or not self.store.add(None, 0, tokens, self.cells.saved_order(seq), data, is_whole=True):
            return False
        self._save_s = _blend(self._save_s, self._clock() - began_s)
        for segment in self.store.wholes(tokens)[1 : -KEPT_CHECKPOINTS + 1]:
            if self._starts.get(segment, 0) < FORK_STARTS:
                self.store.drop(segment)
        return True

    def _evict_parked(self) -> bool:
        """Move the least recently parked sequence out of the cells. False if there is none."""
        if not self._parked:
            return False
        seq = next(iter(self._parked))
        if seq in self._unsettled:
            self._save(seq, self._parked[seq])
        self._unpark(seq)
        return True

    def _unpark(self, seq: int) -> None:
        self._leave(seq)
        self._empty(seq)
        self._free.append(seq)

    def _leave(self, seq: int) -> None:
        """A sequence is no longer parked."""
        del self._parked[seq]
        self._saved.discard(seq)
        if seq in self._unsettled:
            self._unsettled.remove(seq)

    def _empty(self, seq: int) -> None:
        self._backend.seq_remove(seq, 0)
        self.cells.truncate(seq, 0)


def _blend(before: float, latest: float) -> float:
    return latest if before == 0.0 else before + _MEMORY * (latest - before)
