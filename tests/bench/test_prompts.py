"""Prompts made of numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localrun.bench.prompts import N_NUMBERS, Wording, numbers


@given(st.integers(0, 2**31), st.text(max_size=10), st.integers(0, 50))
def test_the_same_seed_and_label_give_the_same_numbers(seed: int, label: str, count: int) -> None:
    found = numbers(seed, label, count)
    assert len(found) == count
    assert found == numbers(seed, label, count)
    assert all(0 <= number < N_NUMBERS for number in found)


def test_another_seed_or_label_begins_differently() -> None:
    beginnings = {tuple(numbers(seed, label, 8)) for seed in range(10) for label in ("a", "b")}
    assert len(beginnings) == 20


@given(st.lists(st.integers(0, N_NUMBERS - 1), min_size=1))
def test_a_prompt_has_a_token_or_a_word_per_number(chosen: list[int]) -> None:
    assert len(Wording.IDS.prompt(chosen)) == len(Wording.LOW_IDS.prompt(chosen)) == len(chosen)
    text = Wording.TEXT.prompt(chosen)
    assert isinstance(text, str)
    assert len(text.split()) == len(chosen)


def test_the_highest_number_is_the_highest_id() -> None:
    for wording in (Wording.IDS, Wording.LOW_IDS):
        ids = wording.prompt(range(N_NUMBERS))
        assert isinstance(ids, list)
        assert wording is Wording.LOW_IDS or max(ids) == ids[-1]
        assert min(ids) > 32


def test_prompts_with_a_common_beginning_keep_it_in_every_wording() -> None:
    system = numbers(1, "system", 20)
    for wording in Wording:
        one, other = (wording.prompt(system + numbers(1, label, 5)) for label in ("a", "b"))
        common = wording.prompt(system)
        assert one[: len(common)] == other[: len(common)] == common
        assert one != other
