"""The held-out cases: what is asked, and when an answer counts as right. Pure.

Everything drawn here is on the side of the split that training never draws in that role (see `corpus.split`): names
told, phrases of words to repeat, plots, and sums in their wordings. The same seed gives the same cases.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tiny.corpus import about_localrun, facts, names, repeat, smalltalk, stories, sums, unknown
from tiny.corpus.phrasing import Exchange, say
from tiny.corpus.words import ANIMALS, CREATURES

MIN_STORY_TOKENS = 60
LONG_RECALL_TURNS = 20


@dataclass(frozen=True)
class Reply:
    """What came back for the last turn. `finish_reason` is `stop` when the model ended by itself."""

    text: str
    n_tokens: int
    finish_reason: str


@dataclass(frozen=True)
class Case:
    """The user's turns, one after the other, and the check of the last reply."""

    turns: tuple[str, ...]
    is_right: Callable[[Reply], bool]


@dataclass(frozen=True)
class Skill:
    """A kind of case, with the share of right answers that the model has to reach (none: only reported)."""

    name: str
    make: Callable[[Random], Case]
    required: float | None


def sum_case(random: Random) -> Case:
    """A one-digit sum in a wording and with digits that were held out together."""
    turn = sums.exchange(random, held_out=True)
    expected = turn.assistant.removesuffix(".").split(" = ")[1]
    return Case((turn.user,), lambda reply: re.findall(r"\d+", reply.text)[-1:] == [expected])


def distractor(random: Random) -> str:
    """A user turn that has nothing to do with what is to be remembered."""
    skills: tuple[Callable[[Random], Exchange], ...] = (
        smalltalk.exchange,
        sums.exchange,
        repeat.exchange,
        about_localrun.exchange,
        unknown.exchange,
        stories.exchange,
    )
    return random.choice(skills)(random).user


def recall_case(random: Random, n_turns: int = 3) -> Case:
    """A held-out name told in the first turn and asked in the last."""
    name = names.name(random, held_out=True)
    told = say(random, random.choice(facts.NAME.tellings), value=name)
    asked = say(random, random.choice(facts.NAME.questions))
    between = tuple(distractor(random) for _ in range(n_turns - 2))
    return Case((told, *between, asked), lambda reply: re.search(rf"\b{re.escape(name)}\b", reply.text) is not None)


def repeat_case(random: Random) -> Case:
    """One to eight words, two in three of them never repeated in training."""
    words = repeat.phrase(random, random.randint(1, repeat.MAX_WORDS), held_out=True)
    return Case((say(random, "repeat after me: {words}", words=words),), lambda reply: reply.text.strip() == words)


def story_case(random: Random) -> Case:
    """A story about an animal, in a plot that was held out."""
    drawn = stories.plot(random, held_out=True)
    request = stories.request(random, drawn)
    return Case((request,), lambda reply: is_story_about(drawn.subject, reply))


def is_story_about(subject: str, reply: Reply) -> bool:
    """Long enough, ended by itself, names its animal three times or more, and no other animal."""
    words = re.findall(r"[a-z]+", reply.text.lower())
    others = {creature for creature in ANIMALS + CREATURES if creature != subject}
    long_enough = reply.n_tokens >= MIN_STORY_TOKENS and reply.finish_reason == "stop"
    return long_enough and words.count(subject) >= 3 and others.isdisjoint(words)


def untold_case(random: Random) -> Case:
    """A fact is asked that was never told; the answer has to admit it."""
    fact = random.choice(facts.ALL)
    asked = say(random, random.choice(fact.questions))
    return Case((distractor(random), asked), lambda reply: "not told me" in reply.text)


def modest_case(random: Random) -> Case:
    """A question outside of what the model learned."""
    return Case((unknown.exchange(random).user,), lambda reply: "tiny model" in reply.text)


SKILLS = (
    Skill("one-digit sums", sum_case, 0.98),
    Skill("name recalled in turn 3", recall_case, 0.98),
    Skill("repeat after me, 1 to 8 words", repeat_case, 0.95),
    Skill("story stays on its animal and ends", story_case, 0.95),
    Skill("name recalled in turn 20", lambda random: recall_case(random, LONG_RECALL_TURNS), None),
    Skill("admits what was not told", untold_case, None),
    Skill("modest about the unknown", modest_case, None),
)


def cases(skill: Skill, n_cases: int, seed: int = 0) -> list[Case]:
    """`n_cases` cases of `skill`."""
    random = Random(f"{skill.name} {seed}")
    return [skill.make(random) for _ in range(n_cases)]
