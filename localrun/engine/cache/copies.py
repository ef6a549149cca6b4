"""What goes between cells and what is kept: sequences are saved in *blocks* or as wholes, and restored.

A block has up to `BLOCK_TOKENS` tokens, so that a prefix that many share is kept once, and a conversation that grows by
a hundred tokens saves a hundred. Models that cannot be cut are saved as wholes, where `checkpoints.py` says.

Owner: the engine's main thread.
Does not: decide which sequence is saved when, or make room in cells (`cache.py`), or in memory (`tiers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from localrun.engine.backend import Backend, Copy, State
from localrun.engine.cache.cells import Layout, WholeStates
from localrun.engine.cache.checkpoints import Checkpoints
from localrun.engine.cache.tiers import Tiers
from localrun.engine.cache.tree import Block, PrefixKey

# More tokens than there are anywhere.
UNCOUNTED = 1 << 40
# Large enough that one native copy is worth its call; small enough that conversations store little twice where they
# diverge, and that the disk reads little more than needed.
BLOCK_TOKENS = 256
# Saved and restored at once in one pool. The buffer for both is touched for the first time only once, which takes
# longer than the copies.
PIECE_TOKENS = 2 * BLOCK_TOKENS
# For fewer tokens a copy costs more than it saves.
GAIN_TOKENS = 16
# Copied in some milliseconds, even into memory that was never written to.
QUICK_BYTES = 8 << 20


class UnsavedRanges(NamedTuple):
    """What must be saved of a sequence: `ranges` behind `parent`. `is_all` is False if not all of it fits, and None if
    there is more to save later. `crumb` is a short last block, which is saved again together with what follows it, so
    that a long conversation is not a chain of crumbs."""

    parent: Block | None
    crumb: Block | None
    ranges: list[tuple[int, int]]
    is_all: bool | None


@dataclass
class SaveInProgress:
    """A stream that is being saved: the first `n_tokens` of `key`, of which `copy` will have `ranges`. The main thread
    has spent `spent_s` on it."""

    seq: int
    key: PrefixKey
    n_tokens: int
    ranges: list[tuple[int, int]]
    copy: Copy
    spent_s: float = 0.0


class Copies:
    def __init__(
        self, backend: Backend, layout: Layout, tiers: Tiers, checkpoints: Checkpoints, clock: Callable[[], float]
    ) -> None:
        self._backend = backend
        self._layout = layout
        self._tiers = tiers
        self._checkpoints = checkpoints
        self._clock = clock
        self._last_piece: tuple[PrefixKey | None, int] = None, 0  # whose it was, and where it began

    def is_worth_saving(self, n_tokens: int) -> bool:
        """Whether restoring a copy would be faster than computing."""
        copy_s = n_tokens * self._tiers.copy_s_per_token
        return self._tiers.is_on and n_tokens >= GAIN_TOKENS and self._tiers.recompute_s(0, n_tokens) > copy_s

    def passed_over(self, n_tokens: int) -> None:
        """So many tokens were not worth saving. What a copy costs fades, so that one slow copy does not rule out all
        later ones."""
        if n_tokens >= GAIN_TOKENS:
            self._tiers.save.fade()
            self._tiers.restore.fade()

    def is_quick(self, n_tokens: int) -> bool:
        """Whether copying `n_tokens` at once takes less time than a step can spare."""
        return n_tokens * self._backend.state_token_bytes <= QUICK_BYTES

    def missing(self, key: PrefixKey, n_tokens: int, most_tokens: int = UNCOUNTED) -> UnsavedRanges:
        """What is not saved yet of the first `n_tokens`, or the first `most_tokens` of that.

        If a prompt is too large for memory, its beginning is saved; nothing is copied that cannot be kept.
        """
        tiers = self._tiers
        n_fitting = tiers.most_bytes // self._backend.state_token_bytes
        is_all = n_tokens <= n_fitting
        n_tokens = key.floor(min(n_tokens, n_fitting))
        saved = tiers.match(key._replace(atoms=()), n_tokens).saved()
        tiers.touch(saved.blocks)
        start = saved.n_tokens
        parent = saved.blocks[-1] if saved.pieces else None
        if n_tokens - start < GAIN_TOKENS and (parent or not n_tokens or not is_all):
            return UnsavedRanges(parent, None, [], is_all)
        if key.floor(start) < start:
            return UnsavedRanges(
                parent, None, [], False
            )  # two chunks of media whose first tokens happen to be the same
        crumb = None
        if parent and parent.end == start and not parent.children and parent.n_tokens < BLOCK_TOKENS // 2:
            start, crumb, parent = parent.start, parent, parent.parent
        end = min(n_tokens, key.cut_after(start, most_tokens))
        bounds = [start]
        while bounds[-1] < end:
            bounds.append(min(end, key.cut_after(bounds[-1], BLOCK_TOKENS)))
        return UnsavedRanges(parent, crumb, list(pairwise(bounds)), is_all if end == n_tokens else None)

    def begin(self, seq: int, key: PrefixKey, n_tokens: int) -> SaveInProgress | None:
        """Start to read a stream, which a thread cuts into blocks; None if all of it is saved already."""
        ranges = self.missing(key, n_tokens).ranges
        return SaveInProgress(seq, key, n_tokens, ranges, self._backend.save(seq, ranges)) if ranges else None

    def go_on(self, saving: SaveInProgress, timeout_s: float) -> bool:
        """Do what is native of a copy, after waiting at most `timeout_s` for its thread. Whether it is done."""
        if timeout_s:
            saving.copy.wait(timeout_s)
        began_s = self._clock()
        is_done = saving.copy.advance()
        saving.spent_s += self._clock() - began_s
        return is_done

    def save(
        self, seq: int, key: PrefixKey, n_tokens: int, spare: int | None, cut: SaveInProgress | None = None
    ) -> bool | None:
        """Save what is not saved yet of a sequence's first `n_tokens`; with a `spare` sequence, in one pool, a piece of
        it. False if not all of it fits, None if there is more to save. `cut` is what a thread has read already."""
        tiers = self._tiers
        # Without a spare sequence, every piece would export the whole sequence.
        missing = self.missing(key, n_tokens, UNCOUNTED if spare is None else PIECE_TOKENS)
        ranges, parent = missing.ranges, missing.parent
        if not ranges:
            return missing.is_all
        if cut is not None and cut.ranges != ranges:
            return None  # it was cut for what was missing at that time
        if missing.is_all is None:
            (last_key, last_start), self._last_piece = self._last_piece, (key, ranges[0][0])
            if last_key is key and ranges[0][0] <= last_start:
                return False  # what was saved is already lost again: this would never end
        if missing.crumb is not None:
            tiers.drop(missing.crumb)
        began_s = self._clock()
        slices: Generator[State] = (
            (state for state in cut.copy.states) if cut else self._layout.save(seq, ranges, spare)
        )
        with closing(slices):
            for (first, last), data in zip(ranges, slices, strict=True):
                parent = tiers.tree.graft(parent, first, key.tokens[first:last], root=key.root)
                if not tiers.keep(parent, data):
                    return False
        spent_s = self._clock() - began_s + (cut.spent_s if cut else 0.0)
        tiers.save.note(spent_s / (ranges[-1][1] - ranges[0][0] if spare is not None else n_tokens))
        return missing.is_all

    def save_whole(self, seq: int, key: PrefixKey) -> bool:
        """Save the whole state of a sequence, unless an earlier checkpoint is as good. False if it does not fit."""
        assert isinstance(self._layout, WholeStates)
        tiers, n_tokens = self._tiers, self._layout.cells.length(seq)
        states = tiers.match(key, n_tokens).states()
        n_saved = states[-1].end if states else 0
        if not self._checkpoints.pays(n_saved, n_tokens):
            tiers.touch(states[-1:])
            self._checkpoints.passed_over(n_saved, n_tokens)
            return True
        began_s = self._clock()
        data = self._layout.save_whole(seq, tiers.limit_bytes or tiers.most_bytes)
        if data is None or not tiers.keep(tiers.tree.graft_state(key.tokens[:n_tokens], root=key.root), data):
            return False
        self._checkpoints.save.note(self._clock() - began_s)
        for state in self._checkpoints.surplus(tiers.match(key, n_tokens).states()):
            tiers.drop(state)
        return True

    def restore(self, seq: int, key: PrefixKey, n_tokens: int, spare: int | None) -> int:
        """Append to a sequence what it lacks of the first `n_tokens`, which are saved and for which there are cells. In
        one pool, pieces are appended through a `spare` sequence. Returns how many tokens it holds then."""
        start = self._layout.cells.length(seq)
        if start and spare is None:
            return start
        began_s = self._clock()
        saved = self._tiers.match(key, n_tokens).saved()
        missing = [(block, max(first, start), end) for block, first, end in saved.pieces if end > start]
        n_at_once = PIECE_TOKENS // BLOCK_TOKENS if spare is not None else max(1, len(missing))
        for at in range(0, len(missing), n_at_once):
            pieces = []
            for block, first, end in missing[at : at + n_at_once]:
                if (data := self._tiers.load(block)) is None:
                    break
                pieces.append((data, block.start, first, end))
            if pieces and not self._layout.load(seq, pieces, spare):
                self._tiers.drop(missing[at][0])
            is_all = self._layout.cells.length(seq) == missing[: at + n_at_once][-1][2]
            if not is_all:
                break
        n_tokens = self._layout.cells.length(seq)
        self._tiers.touch(block for block, first, _ in saved.pieces if first < n_tokens)
        if n_tokens > start:
            self._tiers.restore.note((self._clock() - began_s) / (n_tokens - start))
        return n_tokens

    def restore_whole(self, seq: int, key: PrefixKey, limit: int, make_room: Callable[[int], bool]) -> int:
        """Restore the longest checkpoint of a prompt into an empty sequence. Returns its length; 0 if there is none, or
        if `make_room` has no cells for it."""
        while states := self._tiers.match(key, limit).states():
            block = states[-1]
            if not make_room(block.end):
                return 0
            began_s = self._clock()
            data = self._tiers.load(block)
            assert isinstance(self._layout, WholeStates)
            if data is not None and self._layout.load_whole(seq, data, block.end):
                self.note_start(block)
                self._checkpoints.restore.note(self._clock() - began_s)
                return block.end
            self._tiers.drop(block)
        return 0

    def note_start(self, state: Block) -> None:
        """A request continues from a checkpoint."""
        self._tiers.touch([state])
        state.n_starts += 1
