"""Drafts of smaller models: what a model's sequences hold, how they catch up with the requests, and what it says next;
and which models there are, the engine's own and one that requests name instead.

The draft model reads a request's tokens as the model itself does, in a sequence of its own. Then it says the likeliest
next token, reads that, says the next one, and so on. Whatever the model chose otherwise is cut off before the next
draft. All requests share a decode: one for what their sequences lack, then one for each position that is drafted.

A sequence that lacks much, such as a long prompt, catches up over several calls, the others' drafts beside it. When a
request leaves, its sequence keeps the tokens until another request needs it, so that the next turn of a conversation
has little to catch up with. If there are more requests than sequences, the least recently used one gives way.

Owner: the engine's main thread; a thread of its own loads and frees models. The clock is passed in.
Invariant: the cells of a sequence hold exactly its `tokens`, at the positions from 0 on.
Does not: know how to load a model (`native/drafters.py`), or touch the one that is drafted for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from localrun.engine.backend import Batch, DecodeFailed, NoRoom
from localrun.engine.request import Request
from localrun.engine.schedule.budget import TILE_ROWS, CostModel, best_size
from localrun.engine.speculate.speculation import Drafter
from localrun.errors import EngineFailed
from localrun.wire import DraftSource

log = logging.getLogger("localrun.engine")

# With the row of the last token that makes eight, which suits kernels that take rows in fours.
MOST_TOKENS = 7
# What sequences lack is computed for about so long in one call, since streams wait meanwhile.
CATCH_UP_S = 0.03
# Nobody has to wait for what lacks no more than this.
FEW_ROWS = 32
# Of the tokens after the first one: it is left out if the draft model itself thinks a draft that long less likely.
LEAST_CHANCE = 0.1


class DraftContext(Protocol):
    """A loaded draft model. Its calls are those of `Backend`, and raise the same.

    A sequence has at most `n_ctx` tokens, all sequences together `n_cells`. Both models know the tokens below
    `n_vocab`. A batch has a row for each sequence at least.
    """

    batch: Batch
    n_seqs: int
    n_ctx: int
    n_cells: int
    n_vocab: int
    eog_tokens: frozenset[int]

    def alone(self) -> AbstractContextManager[None]:
        """Nothing else computes inside of this. All decodes are inside of it."""

    def decode(self, n_rows: int) -> None: ...

    def likeliest(self, row: int) -> tuple[int, float]:
        """The likeliest token after a row of the last decode, and its probability."""

    def seq_remove(self, seq: int, start: int) -> None:
        """Remove everything from a position on."""

    def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class _Sequence:
    """The first `n_same` of its `tokens` are those of its request, if it has one."""

    number: int
    tokens: list[int] = field(default_factory=list)
    n_same: int = 0
    request: Request | None = None
    used_at: int = 0

    def gain(self, tokens: list[int]) -> int:
        """How many more tokens a request with these tokens would find here than would be lost; 0 if it is worse."""
        n_common = _n_common(self.tokens, tokens, 0)
        return max(0, 2 * n_common - len(self.tokens))


@dataclass(eq=False, slots=True)
class _Turn:
    """A request that drafts up to `n_wanted` tokens in this call. `chance` is that of the draft as a whole."""

    sequence: _Sequence
    known: list[int]
    n_wanted: int
    draft: list[int]
    chance: float = 1.0

    @property
    def n_lacking(self) -> int:
        """Tokens that its sequence does not hold yet; at least the last one."""
        return len(self.known) - len(self.sequence.tokens)


class _Row(NamedTuple):
    """One row of a batch: the next token of a sequence."""

    sequence: _Sequence
    token: int
    wants_logits: bool


class DraftModel:
    """One model: see the module and `Drafter`. Nothing is wanted of a request with 0: it only catches up.

    A decode that fails is the last one, since only a new context could help; from then on there are no drafts.
    """

    source = DraftSource.DRAFT_MODEL

    def __init__(
        self,
        context: DraftContext,
        clock: Callable[[], float],
        *,
        n_most: int = MOST_TOKENS,
        least_chance: float = LEAST_CHANCE,
    ) -> None:
        self.n_most = n_most
        self._context = context
        self._clock = clock
        self._least_chance = least_chance
        self._sequences = [_Sequence(number) for number in range(context.n_seqs)]
        self._of: dict[Request, _Sequence] = {}
        self._cost = CostModel()
        self._n_calls = 0
        self._is_broken = False

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wanted]
        if self._is_broken:
            return drafts
        try:
            self._n_calls += 1
            requests = {request for request, _ in wanted}
            turns = []
            for (request, n_tokens), draft in zip(wanted, drafts, strict=True):
                sequence = self._place(request, requests)
                if sequence is not None:
                    turns.append(_Turn(sequence, request.tokens, min(n_tokens, self.n_most), draft))
            if turns:
                turns.sort(key=lambda turn: turn.sequence.number)
                with self._context.alone():
                    self._draft(turns, requests)
        except (DecodeFailed, EngineFailed, NoRoom):
            log.exception("the draft model failed; there are no more drafts of it")
            self._is_broken = True
        return drafts

    def drop(self, request: Request) -> None:
        sequence = self._of.pop(request, None)
        if sequence is not None:
            sequence.request = None

    def close(self) -> None:
        self._context.close()

    # --- sequences ---------------------------------------------------------------------------------------------

    @property
    def _n_held(self) -> int:
        return sum(len(sequence.tokens) for sequence in self._sequences)

    def _place(self, request: Request, wanted: Collection[Request]) -> _Sequence | None:
        """The request's sequence, cut back to what it has in common with the request, without its last token at least.
        None if there is none for it, or it is too long for this model."""
        if len(request.tokens) > self._context.n_ctx:
            self.drop(request)
            return None
        sequence = self._of.get(request) or self._choose(request, wanted)
        if sequence is None:
            return None
        sequence.used_at = self._n_calls
        sequence.n_same = _n_common(sequence.tokens, request.tokens, sequence.n_same)
        self._cut(sequence, min(sequence.n_same, len(request.tokens) - 1))
        return sequence

    def _choose(self, request: Request, wanted: Collection[Request]) -> _Sequence | None:
        """A sequence for a request without one: the one that holds the beginning of its tokens, else the least recently
        used one, if need be that of a request that does not draft in this call."""
        free = [one for one in self._sequences if one.request is None]
        free = free or [one for one in self._sequences if one.request not in wanted]
        if not free:
            return None
        sequence = max(free, key=lambda one: (one.gain(request.tokens), -one.used_at))
        if sequence.request is not None:
            self.drop(sequence.request)
        sequence.request, sequence.n_same = request, 0
        self._of[request] = sequence
        return sequence

    def _cut(self, sequence: _Sequence, n_kept: int) -> None:
        if len(sequence.tokens) > n_kept:
            self._context.seq_remove(sequence.number, n_kept)
            del sequence.tokens[n_kept:]
        sequence.n_same = min(sequence.n_same, n_kept)

    def _make_room(self, n_rows: int, wanted: Collection[Request]) -> int:
        """How many of so many rows have free cells, after sequences that nobody drafts with gave theirs, the least
        recently used ones first."""
        n_free = self._context.n_cells - self._n_held
        while n_free < n_rows:
            others = [one for one in self._sequences if one.tokens and one.request not in wanted]
            if not others:
                return n_free
            oldest = min(others, key=lambda one: (one.request is not None, one.used_at))
            n_free += len(oldest.tokens)
            self._cut(oldest, 0)
        return n_rows

    # --- computing ---------------------------------------------------------------------------------------------

    def _draft(self, turns: list[_Turn], wanted: Collection[Request]) -> None:
        ready = self._catch_up(turns, wanted)
        while ready:
            rows = [_Row(turn.sequence, turn.draft[-1], True) for turn in ready]
            if self._make_room(len(rows), wanted) < len(rows):
                return
            self._decode(rows)
            ready = [turn for row, turn in enumerate(ready) if self._take(turn, row)]

    def _catch_up(self, turns: list[_Turn], wanted: Collection[Request]) -> list[_Turn]:
        """Read what the sequences lack. Those that lack much do it one by one, and not together with others: beside the
        rows of another sequence theirs would not fill their tiles. Returns who goes on to draft."""
        quick = [turn for turn in turns if turn.n_lacking <= FEW_ROWS]
        slow = min((turn for turn in turns if turn not in quick), key=lambda turn: turn.n_lacking, default=None)
        ready = self._read([slow], wanted) if slow is not None else []
        ready += self._read(quick, wanted)
        return sorted(ready, key=lambda turn: turn.sequence.number)

    def _read(self, turns: list[_Turn], wanted: Collection[Request]) -> list[_Turn]:
        """One decode of what these sequences lack, or of the beginning of it. Returns who goes on to draft."""
        left = min(sum(turn.n_lacking for turn in turns), self._most_rows(turns))
        left = self._make_room(left, wanted)
        rows, last_rows = [], []
        for turn in turns:
            start = len(turn.sequence.tokens)
            tokens = turn.known[start : min(len(turn.known), start + left)]
            left -= len(tokens)
            is_last = start + len(tokens) == len(turn.known) and turn.n_wanted > 0
            rows += [_Row(turn.sequence, token, False) for token in tokens]
            if is_last:
                rows[-1] = rows[-1]._replace(wants_logits=True)
                last_rows.append((turn, len(rows) - 1))
        if not rows:
            return []
        depth, began_s = len(rows[0].sequence.tokens), self._clock()
        self._decode(rows)
        if len(rows) >= TILE_ROWS:
            self._cost.observe(len(rows), depth, self._clock() - began_s)
        for turn in turns:
            turn.sequence.n_same = len(turn.sequence.tokens)
        return [turn for turn, row in last_rows if self._take(turn, row)]

    def _most_rows(self, turns: list[_Turn]) -> int:
        """Rows that may be read in one decode: whole tiles, since the rows of less than one take as long."""
        capacity = self._context.batch.capacity
        if len(turns) != 1:
            return capacity
        depth = len(turns[0].sequence.tokens)
        is_known = self._cost.knows(depth)
        n_rows = best_size(self._cost, capacity, depth, CATCH_UP_S) if is_known else TILE_ROWS
        return min(capacity, max(n_rows, TILE_ROWS))

    def _decode(self, rows: list[_Row]) -> None:
        """Compute rows, those of one sequence one after the other. They are in its cells afterwards."""
        batch, n_vocab = self._context.batch, self._context.n_vocab
        lengths = {row.sequence: len(row.sequence.tokens) for row in rows}
        for number, row in enumerate(rows):
            # A token that only the other model knows is read as another one, which makes the draft worse and not wrong.
            batch.token[number] = row.token if row.token < n_vocab else 0
            batch.pos[number] = lengths[row.sequence]
            batch.seq[number] = row.sequence.number
            batch.wants_logits[number] = row.wants_logits
            lengths[row.sequence] += 1
        self._context.decode(len(rows))
        for row in rows:
            row.sequence.tokens.append(row.token)

    def _take(self, turn: _Turn, row: int) -> bool:
        """Add the likeliest token after a row to a draft. Whether another one may follow it."""
        token, probability = self._context.likeliest(row)
        turn.chance *= probability
        # The first one is said in any case: without, nobody would ever learn how often this model is right.
        if token >= self._context.n_vocab or (turn.draft and turn.chance < self._least_chance):
            return False
        turn.draft.append(token)
        is_full = len(turn.draft) == turn.n_wanted or len(turn.sequence.tokens) == self._context.n_ctx
        return not is_full and token not in self._context.eog_tokens


def _n_common(tokens: list[int], others: list[int], start: int) -> int:
    """How many tokens two lists begin with that are the same, where the first `start` are known to be."""
    end = min(len(tokens), len(others))
    return next((at for at in range(start, end) if tokens[at] != others[at]), end)


# Loads the model of a path, and may give up when the other one says that it is not wanted any more.
OpenDraft = Callable[[str, Callable[[], bool]], Drafter]


class DraftModels:
    """All of an engine, as one drafter. Drafts for requests without a draft model are empty.

    The engine's own model is loaded when it opens. Another one is loaded in a thread once a request that names it wants
    to draft; until it is there, such requests go on without drafts. There is one of these at a time. When nobody uses
    it any more it stays, until somebody names yet another one.

    Raises what `open_draft` raises for the engine's own, if it has one."""

    source = DraftSource.DRAFT_MODEL
    n_most = MOST_TOKENS

    def __init__(self, open_draft: OpenDraft, own_path: str = "") -> None:
        self._open_draft = open_draft
        self._is_closed = False
        # By path. The own one stays, the other one comes and goes.
        self._loaded: dict[str, Drafter] = {}
        self._own_path = own_path
        if own_path:
            self._loaded[own_path] = open_draft(own_path, self._is_open)
        self._users: dict[Request, str] = {}  # of others than the own one
        self._refused: set[str] = set()
        self._loader = ThreadPoolExecutor(1, "drafts")
        self._loading: tuple[str, Future[Drafter]] | None = None

    def drafter_for(self, request: Request) -> Drafter | None:
        """This, unless the request has no draft model, or names one that cannot be loaded."""
        path = self._path_of(request)
        return self if path and path not in self._refused else None

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wanted]
        for request, _ in wanted:
            path = self._path_of(request)
            if path != self._own_path and path not in self._refused:
                self._users[request] = path
        if self._users:
            self._look()
        places: dict[Drafter, list[int]] = {}
        for place, (request, _) in enumerate(wanted):
            drafter = self._loaded.get(self._path_of(request))
            if drafter is not None:
                places.setdefault(drafter, []).append(place)
        for drafter, its_places in places.items():
            proposed = drafter.propose([wanted[place] for place in its_places])
            for place, draft in zip(its_places, proposed, strict=True):
                drafts[place] = draft
        return drafts

    def drop(self, request: Request) -> None:
        self._users.pop(request, None)
        for drafter in self._loaded.values():
            drafter.drop(request)

    def close(self) -> None:
        """Waits for the model that is being loaded, which gives up."""
        self._is_closed = True
        self._loader.shutdown()
        self._take_loaded()
        for drafter in self._loaded.values():
            drafter.close()
        self._loaded.clear()

    def _path_of(self, request: Request) -> str:
        return request.draft_model_path or self._own_path

    def _is_open(self) -> bool:
        return not self._is_closed

    def _look(self) -> None:
        """Take what was loaded, and load what is waited for, in place of what nobody uses."""
        if self._loading is not None and not self._take_loaded():
            return
        other = next((path for path in self._loaded if path != self._own_path), None)
        used = self._users.values()
        wanted = next((path for path in used if path not in self._loaded), None)
        if wanted is None or other in used:
            return
        unused = self._loaded.pop(other) if other is not None else None
        self._loading = wanted, self._loader.submit(self._replace, unused, wanted)

    def _replace(self, unused: Drafter | None, path: str) -> Drafter:
        """Loader thread."""
        if unused is not None:
            unused.close()
        return self._open_draft(path, self._is_open)

    def _take_loaded(self) -> bool:
        """Whether nothing is being loaded any more."""
        if self._loading is None:
            return True
        path, loading = self._loading
        if not loading.done():
            return False
        self._loading = None
        try:
            self._loaded[path] = loading.result()
        except Exception as error:
            self._refused.add(path)
            self._users = {request: other for request, other in self._users.items() if other != path}
            if not self._is_closed:
                log.warning("requests that name the draft model %s go on without drafts: %s", path, error)
        return True
