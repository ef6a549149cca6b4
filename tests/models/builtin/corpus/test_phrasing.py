"""What users type varies, what is in a slot does not."""

from __future__ import annotations

from random import Random

from localrun.models.builtin.corpus.phrasing import recased, say


def test_slots_are_kept_exactly() -> None:
    random = Random(1)
    said = [say(random, "my name is {value}", value="ZoË b.") for _ in range(300)]
    assert all(text.endswith("ZoË b.") for text in said)
    assert len(set(said)) > 10


def test_the_fixed_words_change_their_case_and_their_end() -> None:
    random = Random(2)
    said = {say(random, "what is {a} + {b}?", a="3", b="4") for _ in range(500)}
    assert {"What is 3 + 4?", "what is 3 + 4", "WHAT IS 3 + 4?"} <= said
    assert all("3 + 4" in text for text in said)


def test_recasing_changes_case_alone() -> None:
    random = Random(3)
    said = {recased(random, "Ada", p_lower=0.3, p_upper=0.3) for _ in range(100)}
    assert said == {"Ada", "ada", "ADA"}
