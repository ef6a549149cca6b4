"""What goes between cells and what is kept: sequences are saved in *blocks* or as wholes, and restored.

A block has up to `BLOCK_TOKENS` tokens, so that a prefix that many share is kept once, and a conversation that grows by
a hundred tokens saves a hundred. Models that cannot be cut are saved as wholes, where `Checkpoints` says.

Owner: the engine's main thread.
Does not: decide which sequence is saved when, or make room in cells (`cache.py`), or in memory (`tiers.py`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from localrun.engine.backend import Backend, Copy, State
from localrun.engine.cache.cells import Layout, WholeStates
from localrun.engine.cache.tiers import GAIN_TOKENS, Cost, Tiers
from localrun.engine.cache.tree import Block, PrefixKey

# The least distance between checkpoints, however fast copies are: a step that ends early has a cost, too.
CHECKPOINT_GAP_TOKENS = 32
# Per conversation: the first, and the longest ones (its end, the last prompt, the message before).
KEPT_CHECKPOINTS = 4
# The next turn of a conversation starts from its last state once. A state with more starts is a fork.
FORK_STARTS = 2


class Checkpoints:
    """Where whole states are worth saving, and which of them are kept.

    The state of some models (sliding windows, recurrent and hybrid layers) cannot be cut back to a common prefix. It is
    therefore saved as a *checkpoint* where a later prompt is likely to continue or to diverge:

    * after the first message (the system prompt, which conversations share);
    * after the last two messages that the prompt holds (an edited or dropped answer);
    * where it diverges from an earlier prompt (a third prompt may share that prefix too);
    * after its last picture or recording (another question about it);
    * before its last token (the same prompt again), unless only the template's words for the answer follow the last
      message: the next turn may begin the answer in another way, without the mark of thinking;
    * at the end of the request (the next turn).

    A step ends exactly at a checkpoint. No checkpoint is made where computing the tokens since the previous one is
    faster than the copy. For each conversation, the first checkpoint is kept, the last few, and those from which
    several requests started.

    `save` and `restore` are the cost of one state, however long."""

    def __init__(self, tiers: Tiers, message_ends: frozenset[int]) -> None:
        self.save, self.restore = Cost(), Cost()
        self._tiers = tiers
        self._message_ends = message_ends

    def pays(self, start: int, end: int) -> bool:
        """Whether a checkpoint at `end` is worth its copies, given one at `start`."""
        if not self._tiers.is_on or end - start < CHECKPOINT_GAP_TOKENS:
            return False
        return self._tiers.recompute_s(start, end - start) >= self.save.seconds + self.restore.seconds

    def stops(self, key: PrefixKey, n_cached: int, n_common: int) -> list[int]:
        """Where to save a state while computing a prompt with `n_cached` tokens in the cache, which shares its first
        `n_common` tokens with an earlier one."""
        last = key.floor(len(key.tokens) - 1)
        ends = [at for at, token in enumerate(key.tokens[:last], 1) if token in self._message_ends]
        wanted = {*ends[:1], n_common, *ends[-2:], last}
        wanted.update(end for _, end in key.atoms[-1:] if end < last)
        stops: list[int] = []
        for stop in sorted(wanted):
            if self.pays(stops[-1] if stops else n_cached, stop):
                stops.append(stop)
        return stops

    def follow(self, stops: list[int], n_computed: int, n_common: int, n_matched: int) -> bool:
        """Whether a prompt gains by waiting for a running one with which it shares `n_common` tokens, compared with the
        `n_matched` tokens in the cache. Adds a stop where the two diverge, unless one is planned in between."""
        if n_computed >= n_common or not self.pays(n_matched, n_common):
            return False
        if not any(max(n_matched, n_computed) < stop <= n_common for stop in stops):
            insort(stops, n_common)
        return True

    def passed_over(self, start: int, end: int) -> None:
        """No state was saved at `end`, given one at `start`. The costs fade, so that one slow copy does not rule out
        all later ones."""
        if end - start >= CHECKPOINT_GAP_TOKENS:
            self.save.fade()
            self.restore.fade()

    @staticmethod
    def surplus(states: list[Block]) -> list[Block]:
        """The states of one conversation (given shortest first) that need not be kept."""
        return [state for state in states[1 : -KEPT_CHECKPOINTS + 1] if state.n_starts < FORK_STARTS]


# More tokens than there are anywhere.
UNCOUNTED = 1 << 40
# Large enough that one native copy is worth its call; small enough that conversations store little twice where they
# diverge, and that the disk reads little more than needed.
BLOCK_TOKENS = 256
# Saved and restored at once in one pool. The buffer for both is touched for the first time only once, which takes
# longer than the copies.
PIECE_TOKENS = 2 * BLOCK_TOKENS
# How long running streams wait for a piece that is restored for another request.
RESTORE_PIECE_S = 0.015
# How long to wait at a time for a copy that a thread is working on.
WAIT_S = 0.02


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
    """See the module. `keys` are those of all sequences in use. `saving` is a stream that is being saved beside the
    steps."""

    def __init__(
        self,
        backend: Backend,
        layout: Layout,
        tiers: Tiers,
        checkpoints: Checkpoints,
        keys: dict[int, PrefixKey],
        clock: Callable[[], float],
    ) -> None:
        self.saving: SaveInProgress | None = None
        self._backend = backend
        self._layout = layout
        self._tiers = tiers
        self._checkpoints = checkpoints
        self._keys = keys
        self._clock = clock
        self._last_piece: tuple[PrefixKey | None, int] = None, 0  # whose it was, and where it began

    def n_unsaved(self, seq: int) -> int:
        """How many tokens of a parked sequence are in its cells alone."""
        n_tokens = self._layout.cells.length(seq)
        return n_tokens - self._tiers.match(self._keys[seq]._replace(atoms=()), n_tokens).saved().n_tokens

    @property
    def restored_tokens(self) -> int:
        """Tokens that are restored at once while running requests wait for it."""
        token_s = self._tiers.restore.seconds
        return max(1, int(RESTORE_PIECE_S / token_s / PIECE_TOKENS) if token_s else 1) * PIECE_TOKENS

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

    def begin(self, seq: int) -> None:
        """Start to save a parked stream beside the steps: to read it, for a thread to cut it into blocks."""
        key, n_tokens = self._keys[seq], self._layout.cells.length(seq)
        ranges = self.missing(key, n_tokens).ranges
        if ranges:
            self.saving = SaveInProgress(seq, key, n_tokens, ranges, self._backend.save(seq, ranges))
        else:
            self.save_parked(seq, None)

    def go_on(self, timeout_s: float) -> None:
        """Continue saving a stream after waiting at most `timeout_s` for its thread; at the end, keep the blocks."""
        saving = self.saving
        assert saving is not None
        if timeout_s:
            saving.copy.wait(timeout_s)
        began_s = self._clock()
        is_done = saving.copy.advance()
        saving.spent_s += self._clock() - began_s
        if not is_done:
            return
        self.saving = None
        is_saved = self.save(saving.seq, saving.key, saving.n_tokens, None, cut=saving)
        if is_saved is not None and self._keys.get(saving.seq) is saving.key:
            self._tiers.unsaved.pop(saving.seq, None)

    def is_reading(self, seq: int) -> bool:
        """Whether this sequence must stay as it is, for it is being saved and was not read yet."""
        return self.saving is not None and self.saving.seq == seq and not self.saving.copy.has_left

    def save_parked(self, seq: int, spare: int | None, *, at_once: bool = True) -> bool:
        """Save a parked sequence, or a piece of it, unless that is already done. Whether all of it is saved now, and
        was not before; it may change from now on."""
        while self.is_reading(seq):
            self.go_on(WAIT_S)
        unsaved = self._tiers.unsaved
        if seq not in unsaved:
            return False
        if self.saving is not None and self.saving.seq == seq:
            del unsaved[seq]  # all of it has been read
            return False
        is_saved: bool | None = None
        while is_saved is None:
            if self._layout.can_cut:
                is_saved = self.save(seq, self._keys[seq], self._layout.cells.length(seq), spare)
            else:
                is_saved = self.save_whole(seq, self._keys[seq])
            if is_saved is None and not at_once:
                return False
        del unsaved[seq]
        return is_saved

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
        tiers, n_tokens = self._tiers, self._layout.cells.length(seq)
        states = tiers.match(key, n_tokens).states()
        n_saved = states[-1].end if states else 0
        if not self._checkpoints.pays(n_saved, n_tokens):
            tiers.touch(states[-1:])
            self._checkpoints.passed_over(n_saved, n_tokens)
            return True
        began_s = self._clock()
        data = self._backend.state_get(seq, limit_bytes=tiers.limit_bytes or tiers.most_bytes)
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
