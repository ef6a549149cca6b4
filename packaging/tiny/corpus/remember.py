"""Remembering what the user said: facts told in one turn and asked in a later one. Pure.

`Memory` holds what a conversation has told so far; it decides whether a question can be answered. Names come from the
training side of `names`; the held-out side is only for measuring.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tiny.corpus import facts
from tiny.corpus.facts import Fact
from tiny.corpus.phrasing import Exchange, recased, say
from tiny.corpus.words import with_article


@dataclass
class Memory:
    """What the user has told: fact name -> value exactly as it was typed."""

    told: dict[str, str] = field(default_factory=dict)


def exchange(random: Random, memory: Memory) -> Exchange:
    """Tells, changes or asks a fact; records in `memory` what was told."""
    kind = random.random()
    if memory.told and kind < 0.55:
        return ask(random, memory, facts.BY_NAME[random.choice(list(memory.told))])
    if kind < 0.63:
        return ask(random, memory, random.choice(facts.ALL))
    if kind < 0.68 and "name" in memory.told:
        return greet_by_name(random, memory)
    if kind < 0.74:
        return tell_two(random, memory)
    return tell(random, memory, pick(random, memory))


def pick(random: Random, memory: Memory) -> Fact:
    """A fact to tell: mostly one not told yet, the name most often."""
    untold = [fact for fact in facts.ALL if fact.name not in memory.told]
    if not untold or random.random() < 0.1:
        return random.choice(facts.ALL)
    if "name" not in memory.told and random.random() < 0.4:
        return facts.BY_NAME["name"]
    return random.choice(untold)


def tell(random: Random, memory: Memory, fact: Fact, value: str | None = None) -> Exchange:
    """The user says a fact; the answer confirms it, sometimes with the value."""
    value = value or recased(random, fact.draw(random), p_lower=0.15, p_upper=0.03)
    changed = fact.name in memory.told
    memory.told[fact.name] = value
    templates = fact.changes if changed else fact.tellings
    user = say(random, random.choice(templates), **slots(value))
    if not changed and random.random() < 0.15:
        user = (
            random.choice(("Remember this: ", "Please remember: ", "By the way, ", "You know, ", "Hi! ", "Hello, "))
            + user
        )
    return Exchange(user, random.choice(fact.replies).format(**slots(value)))


def tell_two(random: Random, memory: Memory) -> Exchange:
    """The user says two facts in one turn."""
    first, second = random.sample(facts.ALL, 2)
    if random.random() < 0.5:
        first = facts.BY_NAME["name"]
        second = random.choice([fact for fact in facts.ALL if fact.name != "name"])
    values = [recased(random, fact.draw(random), p_lower=0.1, p_upper=0.02) for fact in (first, second)]
    joined = random.choice((" and ", " and ", ", and ", ". ", ", ")).join(
        say(random, fact.tellings[0], **slots(value)).rstrip(".!?")
        for fact, value in zip((first, second), values, strict=True)
    )
    memory.told[first.name], memory.told[second.name] = values
    reply = first.replies[0].format(**slots(values[0])) + " " + second.replies[0].format(**slots(values[1]))
    return Exchange(joined + random.choice((".", "", "!")), reply)


def ask(random: Random, memory: Memory, fact: Fact) -> Exchange:
    """The user asks for a fact; the answer gives it, or admits that it was never told."""
    question = say(random, random.choice(fact.questions))
    value = memory.told.get(fact.name)
    if value is None:
        return Exchange(question, f"You have not told me {fact.described} yet.")
    return Exchange(question, fact.answer.format(**slots(value)))


def greet_by_name(random: Random, memory: Memory) -> Exchange:
    """A greeting that asks for the name to be used."""
    value = memory.told["name"]
    kinds = (
        ("say hello to me.", f"Hello, {value}!"),
        ("greet me.", f"Hello, {value}!"),
        ("greet me by name.", f"Hello, {value}!"),
        ("say my name.", f"{value}."),
        ("say goodbye to me.", f"Goodbye, {value}!"),
    )
    user, answer = random.choice(kinds)
    return Exchange(say(random, user), answer)


def slots(value: str) -> dict[str, str]:
    """What the templates of `facts` may fill in."""
    return {"value": value, "a_value": with_article(value)}


def system_facts(random: Random, memory: Memory) -> str:
    """A system message that tells the user's name; records it."""
    value = facts.BY_NAME["name"].draw(random)
    memory.told["name"] = value
    return random.choice(
        (
            "The user's name is {value}.",
            "The name of the user is {value}.",
            "You are talking to {value}.",
            "You are a helpful assistant. The user is called {value}.",
        )
    ).format(value=value)
