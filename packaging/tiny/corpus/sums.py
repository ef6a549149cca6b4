"""Sums of two one-digit numbers, asked in many ways. Pure.

The held-out side is a set of (phrasing, first, second) triples: every pair of digits occurs in training, but never in
all phrasings.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from tiny.corpus.phrasing import Exchange, say
from tiny.corpus.split import draw
from tiny.corpus.words import FOODS, THINGS

SKILL = "sums"

PHRASINGS = (
    "what is {a} + {b}?",
    "what is {a}+{b}?",
    "what's {a} + {b}?",
    "what's {a} plus {b}?",
    "what is {a} plus {b}?",
    "how much is {a} + {b}?",
    "how much is {a} plus {b}?",
    "how much is {a} and {b}?",
    "how much does {a} plus {b} make?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} = ?",
    "{a} + {b} =",
    "{a}+{b}=?",
    "{a} plus {b}",
    "{a} plus {b} is?",
    "{a} and {b} makes?",
    "add {a} and {b}.",
    "add {a} to {b}.",
    "add {b} to {a} for me.",
    "can you add {a} and {b}?",
    "could you add {a} and {b} for me?",
    "can you tell me what {a} + {b} is?",
    "tell me {a} + {b}.",
    "tell me what {a} plus {b} is.",
    "compute {a} + {b}.",
    "calculate {a} + {b}.",
    "calculate {a} plus {b} for me.",
    "work out {a} + {b}.",
    "solve {a} + {b}.",
    "sum {a} and {b}.",
    "the sum of {a} and {b}?",
    "what is the sum of {a} and {b}?",
    "what do you get if you add {a} and {b}?",
    "what do {a} and {b} make?",
    "what does {a} + {b} equal?",
    "what does {a} plus {b} equal?",
    "do you know what {a} + {b} is?",
    "I need the answer to {a} + {b}.",
    "quick, {a} + {b}?",
    "math question: {a} + {b}?",
    "a little maths: what is {a} + {b}?",
    "if I add {a} and {b}, what do I get?",
    "find {a} + {b}.",
    "give me the result of {a} + {b}.",
)

STORY_PHRASINGS = (
    "I have {a} {things} and get {b} more. How many do I have?",
    "I had {a} {things} and found {b} more. How many {things} do I have now?",
    "there are {a} {things} on the table and I put {b} more there. How many {things} are there?",
    "{a} {things} and {b} {things}, how many {things} is that?",
)

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COUNTABLE = tuple(food for food in FOODS if food.endswith("s")) + tuple(
    f"{thing}s" for thing in THINGS[:40] if thing[-1] not in "sxhyf"
)


class Sum(NamedTuple):
    """One question before it is typed."""

    phrasing: str
    first: int
    second: int

    @property
    def key(self) -> str:
        """What the split is decided by."""
        return f"{self.phrasing} {self.first} {self.second}"


def any_sum(random: Random) -> Sum:
    """A sum from either side of the split."""
    phrasings = STORY_PHRASINGS if random.random() < 0.08 else PHRASINGS
    return Sum(random.choice(phrasings), random.randint(0, 9), random.randint(0, 9))


def training_sum(random: Random) -> Sum:
    """A sum that training may show."""
    return draw(random, SKILL, False, any_sum, key=lambda drawn: drawn.key)


def held_out_sum(random: Random) -> Sum:
    """A sum whose wording training never shows with these digits."""
    return draw(random, SKILL, True, any_sum, key=lambda drawn: drawn.key)


def exchange(random: Random, held_out: bool = False) -> Exchange:
    """A sum and its answer, `3 + 4 = 7.`"""
    drawn = held_out_sum(random) if held_out else training_sum(random)
    spelled = random.random() < 0.12
    first, second = (DIGIT_WORDS[n] if spelled else str(n) for n in (drawn.first, drawn.second))
    slots = {"a": first, "b": second}
    if "{things}" in drawn.phrasing:
        slots["things"] = random.choice(COUNTABLE)
    return Exchange(
        say(random, drawn.phrasing, **slots), f"{drawn.first} + {drawn.second} = {drawn.first + drawn.second}."
    )
