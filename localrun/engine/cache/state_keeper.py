"""Moves the states of sequences between the backend and the store, in segments.

Owner: the engine's main thread. Saving adds only what the store lacks of a sequence, restoring joins the segments of a
path into one state. What it takes is measured, and compared with computing the same tokens anew. Of a prompt that is
too large for the store the beginning is saved, and nothing is copied that cannot be kept.

Does not: know which sequences run, or count cells (the pools do).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from localrun.engine.backend import Backend
from localrun.engine.cache.kv_store import KvStore
from localrun.engine.cache.segments import Path

# Large enough that one native copy is worth its call, small enough that what conversations do not share is not kept
# twice and that the disk is read for what is needed.
SEGMENT_TOKENS = 256
# A saved state is restored whole, whatever the sequence holds already: for fewer tokens the copy costs more than it
# saves.
GAIN_TOKENS = 16
_NO_ORDER = np.empty(0, np.int32)
_MEMORY = 0.2  # weight of the latest measurement


class StateKeeper:
    """See the module."""

    def __init__(self, backend: Backend, store: KvStore, clock: Callable[[], float]) -> None:
        self.store = store
        self._backend = backend
        self._clock = clock
        self._save_s_per_token = 0.0
        self._restore_s_per_token = 0.0

    @property
    def copy_s_per_token(self) -> float:
        """What saving and restoring take; 0 before anything was."""
        return self._save_s_per_token + self._restore_s_per_token

    def is_worth_saving(self, tokens: list[int]) -> bool:
        """Whether coming back by a copy would be faster than by computing."""
        copy_s = len(tokens) * self.copy_s_per_token
        return self.store.is_on and len(tokens) >= GAIN_TOKENS and self.store.recompute_s(0, len(tokens)) > copy_s

    def save(self, seq: int, tokens: list[int]) -> bool:
        """Put what the store lacks of `tokens`, all of which `seq` holds, into it. False if not all of it fits."""
        n_fitting = self.store.most_bytes // self._backend.state_token_bytes
        is_all = len(tokens) <= n_fitting
        tokens = tokens[:n_fitting]
        path = self.store.match(tokens, len(tokens))
        self.store.touch(path)
        start = path.n_tokens
        parent = path.segments[-1] if path.segments else None
        if len(tokens) - start < GAIN_TOKENS and (path.segments or not tokens or not is_all):
            return is_all
        if parent and parent.end == start and not parent.children and len(parent.tokens) < SEGMENT_TOKENS // 2:
            # A short end that goes on is saved anew, so that a long conversation is not a chain of crumbs.
            start, crumb, parent = parent.start, parent, parent.parent
            self.store.drop(crumb)
        began_s = self._clock()
        bounds = [*range(start, len(tokens), SEGMENT_TOKENS), len(tokens)]
        ranges = list(pairwise(bounds))
        for (first, end), data in zip(ranges, self._backend.state_slices(seq, ranges), strict=True):
            parent = self.store.add(parent, first, tokens[first:end], _NO_ORDER, data)
            if parent is None:
                return False
        self._save_s_per_token = _blend(self._save_s_per_token, (self._clock() - began_s) / len(tokens))
        return is_all

    def restore(self, seq: int, path: Path) -> int:
        """Bring a path into an empty sequence. Returns how many tokens it holds then: 0 when it cannot be had."""
        began_s = self._clock()
        pieces, n_tokens = [], 0
        for segment, start, end in path.pieces():
            data = self.store.load(segment)
            if data is None:
                break
            pieces.append((data, segment.start, start, end))
            n_tokens = end
        if not pieces:
            return 0
        if not self._backend.state_set(seq, self._backend.state_join(seq, pieces)):
            self.store.drop(path.segments[0])
            return 0
        self.store.touch(path)
        self._restore_s_per_token = _blend(self._restore_s_per_token, (self._clock() - began_s) / n_tokens)
        return n_tokens

    def copy(self, source: int, target: int, n_tokens: int) -> bool:
        """Give an empty sequence the first tokens of another one. False if the backend refuses."""
        (data,) = self._backend.state_slices(source, [(0, n_tokens)])
        return self._backend.state_set(target, self._backend.state_join(target, [(data, 0, 0, n_tokens)]))


def _blend(before: float, latest: float) -> float:
    return latest if before == 0.0 else before + _MEMORY * (latest - before)
