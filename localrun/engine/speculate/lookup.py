"""Drafts out of what was said before: the request's own tokens, and the client's prediction.

An answer often repeats its conversation: a file with one change, a list, a quotation, the keys of a record. So the last
tokens are looked up among all earlier ones, and what followed them there is the draft. As long as the answer goes on
like the place that was found, that place is followed, token by token, at no cost. Where the two part, the place is not
given up: an edit changes a few words, and after them the old text goes on (`REALIGN_TOKENS`).

How often a place was right is learned whether or not its tokens were drafted, by what kind of match it was. Nothing is
shared between requests, for otherwise the speed of one answer would tell about another one's text.

Pure. Owner: one request. Does not: decide how many tokens are worth a row (`choice.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter, mul

from localrun.engine.speculate.choice import MOST_DRAFTS
from localrun.wire import DraftSource

# A place is one where the last so many tokens stood as well. Fewer stand everywhere.
N_GRAM = 3
# Of the places with the same last tokens, so many are compared, the latest first, for up to so many tokens back.
MOST_PLACES = 8
MOST_COMPARED = 32
# After a difference, the next tokens are looked for within so many of the text that was followed.
REALIGN_TOKENS = 12
# The beginning of a prediction is trusted like a place where so many tokens were the same.
_PREDICTION_MATCH = 9
# Chances of the next token by the tokens that matched before it: fewer than N_GRAM (after a difference), up to 4, 8,
# 16, 32, and more. A guess that each request corrects for itself.
_PRIOR_CHANCES = (0.6, 0.35, 0.55, 0.8, 0.92, 0.96)
_KINDS = (0,) * N_GRAM + (1,) * 2 + (2,) * 4 + (3,) * 8 + (4,) * 16 + (5,)
_FIRSTS = (1, *(_KINDS.index(kind) for kind in range(1, len(_PRIOR_CHANCES))))  # where each kind begins
# The chances of all tokens of a longest draft, for each kind of its first one.
_AHEAD = [itemgetter(*(*_KINDS[first:], *_KINDS[-1:] * MOST_DRAFTS)[:MOST_DRAFTS]) for first in _FIRSTS]
# A prior counts like so many tokens, and the latest token for at least this much of a chance. Replayed on 48 answers of
# a 135M model, a fixed weight of 0.06 was 2 to 4 % slower where answers repeat their prompts.
_PRIOR_TOKENS, _LATEST = 4, 0.05
_PROMISE_EVERY = 8  # after so many tokens the promises are computed anew
# A long prompt is indexed over several steps, so many tokens at a time: 4 ms.
INDEX_TOKENS = 8192
# Between the prediction and the request's tokens, and in the place of media: no token.
_BREAK = -1
_TOKEN_BITS = 20


class Lookup:
    """See the module. `tokens` belongs to the request and grows; `follow` takes note of it. With `has_media` some of
    the prompt's are below 0."""

    def __init__(
        self, tokens: list[int], n_prompt: int, prediction: Sequence[int] = (), *, has_media: bool = False
    ) -> None:
        self._tokens = tokens
        prompt = tokens[:n_prompt]
        if has_media:
            prompt = [max(token, _BREAK) for token in prompt]
        self._text = [*prediction, _BREAK, *prompt] if prediction else prompt
        self._n_prediction = len(prediction)
        self._n_seen = n_prompt
        self._chances = list(_PRIOR_CHANCES)
        # Where the text goes on after its latest three tokens like these, and of each such place the one before it.
        self._latest: dict[int, int] = {}
        self._earlier: list[int] = []
        # The place that is followed: the position of the token that is expected next, -1 for none.
        self._at = 0 if prediction else -1
        self._n_matched = _PREDICTION_MATCH if prediction else 0
        # Where the text that was followed last differed, -1 for nowhere, and how many tokens ago.
        self._parted_at, self._n_since = -1, 0
        self._n_learned = [0] * len(_PRIOR_CHANCES)
        self._promises = self._new_promises()
        self._index(INDEX_TOKENS)
        if self._at < 0:
            self._at, self._n_matched = self._find(self._text)

    def follow(self) -> float:
        """Take note of the tokens that came since the last call. Returns how many tokens of a long draft are expected
        to be right."""
        n_tokens = len(self._tokens)
        while self._n_seen < n_tokens:
            self._follow(self._tokens[self._n_seen])
            self._n_seen += 1
        return self._promises[_kind(self._n_matched)] if self._at >= 0 else 0.0

    def guess(self, n_most: int, after: Sequence[int] = ()) -> tuple[list[int], list[float], DraftSource]:
        """At most so many tokens that are likely to come next, or next but for `after`, each with the chance that it is
        right if those before it are, and where they are from."""
        at, n_matched = self._place_after(after) if after else (self._at, self._n_matched)
        if at < 0 or n_most <= 0:
            return [], [], DraftSource.LOOKUP
        source = DraftSource.PREDICTION if at < self._n_prediction else DraftSource.LOOKUP
        draft = self._text[at : at + n_most]
        if _BREAK in draft:
            del draft[draft.index(_BREAK) :]
        elif len(draft) < n_most:
            # What repeats itself goes on doing so: the text behind its end is the draft.
            rest = [*after, *draft]
            while len(draft) < n_most:
                draft.append(rest[len(draft) - (len(self._text) - at)])
                rest.append(draft[-1])
        return draft, [self._chances[_kind(n_matched + ahead)] for ahead in range(len(draft))], source

    def _follow(self, token: int) -> None:
        text, at = self._text, self._at
        if at >= 0:
            is_right = text[at] == token
            self._learn(_kind(self._n_matched), is_right)
            if is_right:
                self._at += 1
                self._n_matched += 1
            else:
                self._parted_at, self._n_since = at, 0
                self._at, self._n_matched = -1, 0
        text.append(token)
        self._index(INDEX_TOKENS)
        if self._at < 0:
            if self._parted_at >= 0:
                self._realign(token)
            if self._at < 0 and self._is_indexed and self._earlier[-1] >= 0:
                self._at, self._n_matched = self._longest(self._earlier[-1], text)

    def _learn(self, kind: int, is_right: bool) -> None:
        self._n_learned[kind] += 1
        weight = max(_LATEST, 1 / (_PRIOR_TOKENS + self._n_learned[kind]))
        self._chances[kind] += weight * (is_right - self._chances[kind])
        if sum(self._n_learned) % _PROMISE_EVERY == 0:
            self._promises = self._new_promises()

    def _new_promises(self) -> list[float]:
        """For each kind of match the sum of the chances that a draft is right up to each of its tokens."""
        return [sum(accumulate(chances_of(self._chances), mul)) for chances_of in _AHEAD]

    def _realign(self, token: int) -> None:
        """After a difference: does the text that was followed go on with this token?"""
        self._n_since += 1
        if self._n_since > REALIGN_TOKENS:
            self._parted_at = -1
            return
        near = self._text[self._parted_at : self._parted_at + REALIGN_TOKENS]
        if token in near:
            at = self._parted_at + near.index(token) + 1
            if at < len(self._text) and self._text[at] != _BREAK:
                self._at, self._n_matched = at, 1

    def _place_after(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Where the text would be followed if these came next."""
        end = self._at + len(tokens)
        if self._at >= 0 and end < len(self._text) and self._text[self._at : end] == list(tokens):
            return end, self._n_matched + len(tokens)
        return self._find([*self._text[-MOST_COMPARED:], *tokens])

    def _find(self, last: Sequence[int]) -> tuple[int, int]:
        """The place to follow after these tokens, and how many before it are the same; -1 for none."""
        if len(last) < N_GRAM or _BREAK in last[-N_GRAM:]:
            return -1, 0
        at = self._latest.get(_key(*last[-N_GRAM:]), -1)
        return self._longest(self._earlier[at - N_GRAM] if at == len(self._text) else at, last)

    def _longest(self, at: int, last: Sequence[int]) -> tuple[int, int]:
        """Of this place and earlier ones the one that is most like the last tokens; of equal ones the latest."""
        best, n_best = -1, 0
        for _ in range(MOST_PLACES):
            if at < 0:
                break
            n_matched = self._n_alike(at, last)
            if n_matched > n_best:
                best, n_best = at, n_matched
                if n_best >= MOST_COMPARED:
                    break
            at = self._earlier[at - N_GRAM]
        return best, n_best

    def _n_alike(self, at: int, last: Sequence[int]) -> int:
        """How many tokens before this place are the last ones."""
        n_alike, n_most = N_GRAM, min(at, len(last), MOST_COMPARED)
        while n_alike < n_most and self._text[at - 1 - n_alike] == last[-1 - n_alike] != _BREAK:
            n_alike += 1
        return n_alike

    @property
    def _is_indexed(self) -> bool:
        """Whether all of the text is, so that the last entry is that of the last tokens."""
        return 0 < len(self._earlier) == len(self._text) - N_GRAM + 1

    def _index(self, n_tokens: int) -> None:
        """Index so many more tokens."""
        text, latest, earlier = self._text, self._latest, self._earlier
        for end in range(len(earlier) + N_GRAM, min(len(text), len(earlier) + N_GRAM + n_tokens - 1) + 1):
            key = _key(text[end - 3], text[end - 2], text[end - 1])
            earlier.append(latest.get(key, -1))
            latest[key] = end


def _key(first: int, second: int, third: int) -> int:
    return (first << 2 * _TOKEN_BITS) + (second << _TOKEN_BITS) + third


def _kind(n_matched: int) -> int:
    """The kind of a match, an index into the chances."""
    return _KINDS[n_matched] if n_matched < len(_KINDS) else _KINDS[-1]
