"""Phrase tables are read as they are written, and surface variation changes only what it may."""

from __future__ import annotations

from random import Random

from tiny.corpus import about_localrun, smalltalk
from tiny.corpus.phrasing import Entry, entries, phrases, recased, say


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


def test_phrases_go_over_lines() -> None:
    assert phrases("\na | b |\nc, d\n") == ("a", "b", "c, d")


def test_entries_are_paragraphs_with_answers() -> None:
    text = "\nhello | hi |\nhey\n= Hello!\n= A long\n  answer.\n\nbye\n= Goodbye!\n"
    assert entries(text) == (
        Entry(("hello", "hi", "hey"), ("Hello!", "A long answer.")),
        Entry(("bye",), ("Goodbye!",)),
    )


def test_every_entry_has_questions_and_answers() -> None:
    for entry in smalltalk.INTENTS + about_localrun.HOW_TOS + about_localrun.QUESTIONS:
        assert entry.questions, entry
        assert entry.answers, entry


def test_no_small_talk_is_in_two_entries() -> None:
    questions = [question for entry in smalltalk.INTENTS for question in entry.questions]
    assert len(questions) == len(set(questions))
