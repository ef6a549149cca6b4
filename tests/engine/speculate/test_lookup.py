"""What is drafted out of the conversation."""

from __future__ import annotations

import random

from localrun.engine.speculate.lookup import INDEX_TOKENS, REALIGN_TOKENS, Lookup
from localrun.wire import DraftSource


def grown(tokens: list[int], lookup: Lookup, *more: int) -> None:
    """The answer goes on, token by token."""
    for token in more:
        tokens.append(token)
        lookup.follow()


def drafted(lookup: Lookup, n_most: int, after: tuple[int, ...] = ()) -> list[int]:
    return lookup.guess(n_most, after)[0]


def steps_for(prompt: list[int], answer: list[int], n_most: int, prediction: list[int] | None = None) -> int:
    """Steps that an answer takes if every draft of `n_most` tokens is verified."""
    tokens = list(prompt)
    lookup = Lookup(tokens, len(tokens), prediction or ())
    at = n_steps = 0
    while at < len(answer):
        draft = drafted(lookup, n_most)
        n_right = next((n for n, token in enumerate(draft) if answer[at : at + n + 1][-1:] != [token]), len(draft))
        n_right = min(n_right, len(answer) - at - 1)
        grown(tokens, lookup, *answer[at : at + n_right + 1])
        at += n_right + 1
        n_steps += 1
    return n_steps


def test_what_followed_the_last_tokens_before_is_the_draft():
    tokens = [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3]
    assert drafted(Lookup(tokens, len(tokens)), 3) == [4, 5, 6]


def test_tokens_that_never_stood_together_draft_nothing():
    tokens = list(range(50))
    assert drafted(Lookup(tokens, len(tokens)), 8) == []


def test_of_several_places_the_one_with_the_most_tokens_alike_is_followed():
    tokens = [7, 8, 1, 2, 3, 40, 9, 9, 1, 2, 3, 50, 5, 7, 8, 1, 2, 3]
    assert drafted(Lookup(tokens, len(tokens)), 1) == [40]


def test_a_loop_goes_on_for_longer_than_it_is():
    tokens = [5, 6, 7] * 4
    assert drafted(Lookup(tokens, len(tokens)), 8) == [5, 6, 7, 5, 6, 7, 5, 6]


def test_a_place_that_was_right_is_trusted_more_and_one_that_was_wrong_less():
    tokens = [*range(10, 60), 1, 10, 11, 12]
    lookup = Lookup(tokens, len(tokens))
    before = lookup.guess(1)[1][0]
    grown(tokens, lookup, *range(13, 40))
    assert lookup.guess(1)[1][0] > before
    doubtful = [1, 2, 3, *(token for n in range(40) for token in (n + 100, 1, 2, 3))]
    lookup = Lookup(doubtful, 3)
    for _ in doubtful[3:]:
        lookup.follow()
    chances = lookup.guess(4)[1]
    assert not chances or chances[0] < 0.35


def test_after_a_change_the_old_text_goes_on():
    source = random.Random(1).sample(range(1000), 200)
    changed = [token for old in source for token in ([2000, 2001, 2002] if old in source[20::40] else [old])]
    copied = steps_for(source, source, 7)
    assert steps_for(source, changed, 7) <= copied + 5 * 6
    left_out = [token for token in source if token not in source[20::40]]
    assert steps_for(source, left_out, 7) <= copied + 5 * 4


def test_a_text_that_has_parted_for_good_is_given_up():
    tokens = [*range(10, 60), 10, 11, 12]
    lookup = Lookup(tokens, len(tokens))
    grown(tokens, lookup, *range(500, 500 + REALIGN_TOKENS + 2))
    grown(tokens, lookup, 14)
    assert drafted(lookup, 4) == []


def test_a_prediction_is_drafted_from_its_beginning_and_is_not_the_conversation():
    tokens = [1, 2, 3]
    lookup = Lookup(tokens, 3, prediction=[70, 71, 72, 73])
    assert lookup.guess(8)[0] == [70, 71, 72, 73], "behind its end comes the prompt, which does not follow it"
    assert lookup.guess(8)[2] is DraftSource.PREDICTION
    grown(tokens, lookup, 70, 71)
    assert drafted(lookup, 8) == [72, 73]
    assert drafted(lookup, 8, after=(72,)) == [73]


def test_what_a_grammar_forces_is_gone_on_from():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 60]
    lookup = Lookup(tokens, len(tokens))
    assert drafted(lookup, 3, after=(3, 4, 5)) == [6, 7, 8]
    assert drafted(lookup, 3, after=(99,)) == []


def test_a_long_prompt_is_indexed_over_several_calls():
    prompt = list(range(8 * INDEX_TOKENS))
    tokens = [*prompt, 100_000, 100_001, 100_002]
    lookup = Lookup(tokens, len(tokens))
    last = prompt[-20:-10]
    grown(tokens, lookup, *last[:4])
    assert drafted(lookup, 4) == [], "that far it has not been read"
    grown(tokens, lookup, 100_003, 100_004, *last)
    assert drafted(lookup, 4) == prompt[-10:-6]


def test_media_are_never_drafted_and_a_draft_ends_before_them():
    tokens = [1, 2, 3, 4, -7, -8, 5, 6, 1, 2, 3]
    lookup = Lookup(tokens, len(tokens), has_media=True)
    assert drafted(lookup, 5) == [4]
    grown(tokens, lookup, 4)
    assert drafted(lookup, 5) == []
    grown(tokens, lookup, 5, 6)
    assert all(token >= 0 for token in drafted(lookup, 5))
    only_media = [-7] * 9
    assert drafted(Lookup(only_media, 9, has_media=True), 5) == []
