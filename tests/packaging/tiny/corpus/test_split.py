"""What is held out can never be drawn for training, and every draw follows from its seed."""

from __future__ import annotations

from random import Random

import pytest

from tiny.corpus import facts, names, repeat, stories, sums
from tiny.corpus.split import HELD_OUT_ONE_IN, is_held_out

N_DRAWS = 2000


def test_the_split_ignores_case_and_has_about_the_asked_share() -> None:
    assert is_held_out("names", "Ada") == is_held_out("names", "ADA")
    share = sum(is_held_out("names", f"name{n}") for n in range(8000)) / 8000
    assert 0.8 / HELD_OUT_ONE_IN < share < 1.2 / HELD_OUT_ONE_IN


def test_training_names_and_held_out_names_are_disjoint() -> None:
    random = Random(1)
    training = {names.name(random).lower() for _ in range(N_DRAWS)}
    held_out = {names.name(random, held_out=True).lower() for _ in range(N_DRAWS)}
    assert len(training) > 1000
    assert len(held_out) > 500
    assert training.isdisjoint(held_out)


def test_names_told_in_conversations_are_training_names() -> None:
    random = Random(2)
    told = {facts.NAME.draw(random).split()[0].lower() for _ in range(N_DRAWS)}
    assert not any(is_held_out(names.SKILL, name) for name in told)


def test_training_never_repeats_a_held_out_word() -> None:
    random = Random(3)
    training = [repeat.phrase(random, 1 + n % 8) for n in range(N_DRAWS)]
    words = {word.lower() for phrase in training for word in phrase.split()}
    assert words.isdisjoint(repeat.HELD_OUT_WORDS)
    assert len(repeat.HELD_OUT_WORDS) > 40


@pytest.mark.parametrize("n_words", range(1, 9))
def test_held_out_phrases_have_their_length_and_are_not_training_phrases(n_words: int) -> None:
    random = Random(n_words)
    phrases = [repeat.phrase(random, n_words, held_out=True) for _ in range(100)]
    assert all(len(phrase.split()) == n_words for phrase in phrases)
    training = {repeat.phrase(random, n_words).lower() for _ in range(N_DRAWS)}
    assert training.isdisjoint(phrase.lower() for phrase in phrases)


def test_training_plots_and_held_out_plots_are_disjoint() -> None:
    random = Random(4)
    training = {stories.plot(random) for _ in range(N_DRAWS)}
    held_out = {stories.plot(random, held_out=True) for _ in range(N_DRAWS)}
    assert training.isdisjoint(held_out)
    assert {plot.subject for plot in training}.isdisjoint(stories.HELD_OUT_ANIMALS)
    assert {plot.subject for plot in held_out} >= set(stories.HELD_OUT_ANIMALS)


def test_sums_in_training_cover_every_pair_but_no_held_out_wording() -> None:
    random = Random(5)
    pairs = set()
    for _ in range(20 * N_DRAWS):
        drawn = sums.training_sum(random)
        pairs.add((drawn.first, drawn.second))
        assert not is_held_out(sums.SKILL, drawn.key)
    assert len(pairs) == 100
