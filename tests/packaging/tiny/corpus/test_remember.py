"""A fact told is a fact known; a fact not told is admitted."""

from __future__ import annotations

from random import Random

import pytest

from tiny.corpus import facts, remember
from tiny.corpus.facts import Fact
from tiny.corpus.remember import Memory


@pytest.mark.parametrize("fact", facts.ALL, ids=lambda fact: fact.name)
def test_a_fact_is_asked_and_answered(fact: Fact) -> None:
    random, memory = Random(1), Memory()
    assert "not told me" in remember.ask(random, memory, fact).assistant
    told = remember.tell(random, memory, fact, "Brelun")
    assert "Brelun" in told.user
    answered = remember.ask(random, memory, fact)
    assert "Brelun" in answered.assistant
    assert "Brelun" not in answered.user


def test_a_changed_fact_replaces_the_old_one() -> None:
    random, memory = Random(2), Memory()
    remember.tell(random, memory, facts.NAME, "Ada")
    remember.tell(random, memory, facts.NAME, "Bo")
    assert remember.ask(random, memory, facts.NAME).assistant == "Your name is Bo."


def test_two_facts_in_one_turn_are_both_known() -> None:
    for seed in range(50):
        memory = Memory()
        turn = remember.tell_two(Random(seed), memory)
        assert len(memory.told) == 2
        assert all(value in turn.user for value in memory.told.values())


def test_a_system_message_can_tell_the_name() -> None:
    memory = Memory()
    message = remember.system_facts(Random(3), memory)
    assert memory.told["name"] in message
