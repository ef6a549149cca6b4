"""One answer and the grammar that it must match: which tokens may come next, and what came.

The distribution is exact: a sampler chain only ever sees tokens that are allowed, so it truncates and draws among them.
The one shortcut is greedy's. Its choice is the best of all tokens if that is allowed, so it is looked at first, and
most steps need no mask (a check takes 2 us, a mask of 152,000 tokens 10 to 150).

Until one of `triggers` was produced everything is allowed, but for a token that completes a trigger and goes on with
something the grammar has not. A model that thinks about how calls are written must not be made to write one: with
`has_mentions` a trigger that stands like a word of a sentence, or behind a quotation mark, is none.

The cost is measured, in processor time of the thread, so that a busy machine makes no grammar slow: one that takes
longer than `SLOW_S` for a token is slow for a while, so that others need not wait for it (`grammars.py`). The library's
limits bound a mask at some 20 ms. Taking a token in has no bound: where a text can be read in many ways, each token
costs as much as the square of those before it, and the library keeps the interpreter's lock meanwhile, so that nothing
else in this process goes on. An answer ends where that takes `LIMIT_S`.

Owner: one thread at a time, whichever samples the request's row.
Does not: know how a token is drawn, or compile (`grammars.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from localrun.errors import BadRequest

if TYPE_CHECKING:
    from localrun.engine.sample.grammar_library import CompiledGrammar

# What `choose` returns when no token can follow.
DEAD_END = -1
# What a draw returns whose native code chose a token that the vocabulary does not have.
UNKNOWN = -2
# More than this for one token is noticed by those who are in the same step.
SLOW_S = 0.001
_SLOW_TOKENS = 16
# For taking one token in; schemas of real programs take less than a tenth of a millisecond. Several in a row, because
# some systems count processor time in ticks of 16 ms, and a busy host's time may count as the guest's.
LIMIT_S = 0.05
_N_TOO_LONG = 4
# With fewer than one word of the mask in so many set, the others are not looked at.
_SPARSE = 8
# What a trigger stands behind that is only spoken of, and enough of the text before it to tell.
_MID_SENTENCE = re.compile(rb"(?:[A-Za-z0-9] +|[`'\",(] *)\Z")
_N_BEFORE = 4

# A draw among these token ids (i64[n]); among all of them if None.
Draw = Callable[[NDArray[np.int64] | None], int]


class Constraint:
    """See the module. The state of one answer; `banned` tokens are never chosen, allowed or not. `problem` says why
    there was a dead end."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        *,
        triggers: tuple[str, ...],
        has_mentions: bool = False,
        banned: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self._matcher = grammar.matcher.deep_copy()
        self._clock = clock
        self._cost_s = 0.0
        self._n_slow_left = 0
        self._n_too_long = 0
        self._vocabulary = vocabulary = grammar.vocabulary
        self._trigger = re.compile(b"|".join(re.escape(trigger.encode()) for trigger in triggers))
        self._has_mentions = has_mentions
        self._n_tail = max((len(trigger.encode()) for trigger in triggers), default=0) + _N_BEFORE
        self._tail = b""
        self._banned = np.array(sorted(banned), np.int64)
        self._may = np.full((vocabulary.n_tokens + 31) // 32, 2**32 - 1, np.uint32)
        np.bitwise_and.at(self._may, self._banned >> 5, ~np.left_shift(1, self._banned & 31).astype(np.uint32))
        # u32[ceil(n_vocab / 32)]: bit i of word w is token 32 * w + i. So is `_may`.
        self._mask = np.zeros_like(self._may)
        self.is_waiting = bool(triggers)
        self.problem = ""

    @property
    def is_slow(self) -> bool:
        """Whether the next token had better be chosen while others go on."""
        return self._n_slow_left > 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow what was produced."""
        return not self.is_waiting and self._matcher.is_stopped() and not self._matcher.is_error()

    def forced(self, n_most: int) -> list[int]:
        """At most so many tokens that must come next, as the vocabulary would write their text. The model may write the
        same text in other tokens, so they are drafts. None while the grammar is slow."""
        if self.is_waiting or self.is_slow or self._matcher.is_stopped():
            return []
        return list(self._matcher.compute_ff_tokens()[:n_most])

    def begin(self, text: str) -> None:
        """The answer goes on after this text. Raises BadRequest if that does not match, or takes too long to read."""
        end_s = self._clock() + LIMIT_S * _N_TOO_LONG
        for token in self._vocabulary.tokenizer.tokenize_bytes(text.encode()):
            self._accept(token)
            if self._matcher.is_error():
                raise BadRequest(
                    "messages: the answer goes on from the last one, and that does not begin what the answer's format "
                    "(or schema, or grammar) allows; correct the message, or leave the format out"
                )
            if self._clock() > end_s:
                raise BadRequest(
                    "messages: the answer's format (or schema, or grammar) takes too long to read the last one, from "
                    "which the answer goes on; shorten the message, or leave the format out"
                )

    def accept(self, tokens: Sequence[int]) -> None:
        """These were chosen on another engine, and are part of the answer."""
        for token in tokens:
            self._accept(token)

    def choose(self, draw: Draw, *, tries_first: bool) -> int:
        """The next token, which is then part of the answer; `DEAD_END` if there is none, `UNKNOWN` as
        `draw` does.

        `tries_first`: `draw` gives the same token whatever else is allowed beside it, as greedy does, and never a
        banned one.
        """
        self._cost_s = 0.0
        if self.is_waiting:
            token = self._choose_freely(draw)
        else:
            # A mask leaves others the interpreter's lock, a check does not.
            token = draw(None) if tries_first and not self.is_slow else DEAD_END
            if token == DEAD_END or (token >= 0 and self._matcher.validate_tokens([token]) != 1):
                token = self._choose_allowed(draw)
        if token >= 0:
            started_at_s = self._clock()
            self._accept(token)
            taken_s = self._clock() - started_at_s
            self._cost_s += taken_s
            self._n_too_long = self._n_too_long + 1 if taken_s > LIMIT_S else 0
            if self._n_too_long == _N_TOO_LONG:
                self.problem = (
                    "the grammar can read what was written so far in so many ways that one more token takes more than "
                    f"{LIMIT_S * 1000:g} ms; make it less ambiguous, or limit the answer's length"
                )
                return DEAD_END
        self._n_slow_left = _SLOW_TOKENS if self._cost_s > SLOW_S else max(0, self._n_slow_left - 1)
        return token

    def _choose_allowed(self, draw: Draw) -> int:
        started_at_s = self._clock()
        allowed = self._allowed()
        self._cost_s += self._clock() - started_at_s
        if not allowed.size:
            why = self._matcher.get_error() or "no token of this model's vocabulary can follow what it wrote so far"
            self.problem = f"the grammar has come to a dead end: {why.partition(chr(10))[0]}"
            return DEAD_END
        return int(allowed[0]) if allowed.size == 1 else draw(allowed)

    def _choose_freely(self, draw: Draw) -> int:
        """A draw among all tokens, again without those that go on wrongly after a trigger."""
        token = draw(None)
        if token < 0 or not self._goes_wrong(token):
            return token
        may = np.ones(self._vocabulary.n_tokens, np.bool_)
        may[self._banned] = False
        while token >= 0 and self._goes_wrong(token):
            may[token] = False
            if not may.any():
                self.problem = "the grammar has come to a dead end: nothing may follow its trigger"
                return DEAD_END
            token = draw(np.flatnonzero(may))
        return token

    def _accept(self, token: int) -> None:
        if not self.is_waiting:
            self._matcher.consume_token(token)
            return
        rest = self._after_trigger(token)
        if rest is None:
            self._tail = (self._tail + self._vocabulary.shown(token))[-self._n_tail :]
            return
        self.is_waiting = False
        if rest:
            self._matcher.consume_tokens(self._vocabulary.tokenizer.tokenize_bytes(rest))

    def _goes_wrong(self, token: int) -> bool:
        rest = self._after_trigger(token)
        if not rest:
            return False
        tokens = self._vocabulary.tokenizer.tokenize_bytes(rest)
        return self._matcher.validate_tokens(tokens) != len(tokens)

    def _after_trigger(self, token: int) -> bytes | None:
        """What this token has after the first trigger that it completes; None if it completes none."""
        text = self._tail + self._vocabulary.shown(token)
        for found in self._trigger.finditer(text):
            is_mention = self._has_mentions and _MID_SENTENCE.search(text, 0, found.start())
            if found.end() > len(self._tail) and not is_mention:
                return text[found.end() :]
        return None

    def _allowed(self) -> NDArray[np.int64]:
        """Ids of the tokens that may follow, in order: i64[n]."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            return np.empty(0, np.int64)
        self._mask &= self._may
        words = np.flatnonzero(self._mask)
        if words.size * _SPARSE > self._mask.size:
            bits = np.unpackbits(self._mask.view(np.uint8), count=self._vocabulary.n_tokens, bitorder="little")
            return np.flatnonzero(bits)
        bits = np.unpackbits(self._mask[words].view(np.uint8), bitorder="little")
        at = np.flatnonzero(bits)
        few: NDArray[np.int64] = (words[at >> 5] << 5) + (at & 31)
        return few
