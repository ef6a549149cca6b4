"""The phrase tables are read as they are written."""

from __future__ import annotations

from localrun.models.builtin.corpus import intents, topics
from localrun.models.builtin.corpus.phrasebook import Entry, entries, phrases


def test_phrases_go_over_lines() -> None:
    assert phrases("\na | b |\nc, d\n") == ("a", "b", "c, d")


def test_entries_are_paragraphs_with_answers() -> None:
    text = "\nhello | hi |\nhey\n= Hello!\n= A long\n  answer.\n\nbye\n= Goodbye!\n"
    assert entries(text) == (
        Entry(("hello", "hi", "hey"), ("Hello!", "A long answer.")),
        Entry(("bye",), ("Goodbye!",)),
    )


def test_every_entry_has_questions_and_answers() -> None:
    for entry in intents.INTENTS + topics.HOW_TOS + topics.QUESTIONS:
        assert entry.questions, entry
        assert entry.answers, entry


def test_no_small_talk_is_in_two_entries() -> None:
    questions = [question for entry in intents.INTENTS for question in entry.questions]
    assert len(questions) == len(set(questions))
