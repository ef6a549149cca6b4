"""The vocabulary made in code. That llama.cpp tokenizes with it is tested in test_synthesize.py."""

from __future__ import annotations

import pytest

from tests.support.synthesis.synthetic_tokenizer import (
    COMMON_WORDS,
    byte_alphabet,
    filler_words,
    made_up_words,
    make_vocabulary,
)


@pytest.mark.parametrize("n_vocab", [512, 2048, 49_152])
def test_every_token_is_there_once(n_vocab: int) -> None:
    vocabulary = make_vocabulary(n_vocab)
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == len(vocabulary.token_types) == n_vocab
    assert vocabulary.token_types.count(3) == 3


def test_every_merge_joins_two_tokens_to_a_third() -> None:
    vocabulary = make_vocabulary(4096)
    known = set(vocabulary.tokens)
    assert len(vocabulary.merges) == len(set(vocabulary.merges)) > 1000
    for merge in vocabulary.merges:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= known


def test_merges_are_the_same_every_time_and_learn_common_words() -> None:
    assert make_vocabulary(4096) == make_vocabulary(4096)
    tokens = set(make_vocabulary(4096).tokens)
    assert {"Ġthe", "Ġand", "Ġof", "ing"} <= tokens


def test_all_tokens_but_bytes_print() -> None:
    for token in make_vocabulary(4096).tokens[259:]:
        assert token.removeprefix("Ġ").isalpha()


def test_bytes_have_a_printable_character_each() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert alphabet[ord("A")] == "A"
    assert (alphabet[ord(" ")], alphabet[ord("\n")], alphabet[0x00], alphabet[0xAD]) == ("Ġ", "Ċ", "Ā", "Ń")


def test_words() -> None:
    assert len(COMMON_WORDS) == len(set(COMMON_WORDS))
    assert len(made_up_words(100)) == 100
    fillers = filler_words()
    first = [next(fillers) for _ in range(10_000)]
    assert len(set(first)) == 10_000
