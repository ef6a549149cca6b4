"""Whole conversations: the skills mixed turn by turn, with or without a system message. Pure and endless.

A conversation is a stream of messages; the caller takes as many as its window holds. Facts told in one turn stay known
to the end, so the further a window reaches, the further back the questions reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tiny.corpus import about_localrun, remember, repeat, smalltalk, stories, sums, unknown
from tiny.corpus.phrasing import Exchange
from tiny.corpus.remember import Memory
from tiny.corpus.words import ADJECTIVES, ANY_WORDS, JOBS, THINGS

Message = dict[str, str]

P_SYSTEM = 0.45
P_SYSTEM_FACT = 0.06
P_SYSTEM_LONG = 0.05

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are tiny, the built-in model of localrun.",
    "You are localrun's built-in model.",
    "Answer briefly.",
    "Be brief.",
    "Be kind.",
    "You are a storyteller.",
    "You are a chatbot.",
    "You are a helpful, polite and honest assistant. Answer in one sentence.",
    "Answer the user's questions.",
    "You help people with localrun.",
    "You are a {adjective} assistant.",
    "You are a {adjective} {job}.",
    "You are an AI assistant that likes {thing}s. Be {adjective}.",
    "Today is Monday. You are a {adjective} {job} and answer in short sentences.",
    "You are an expert {job}. Think step by step and give a {adjective} answer. Do not talk about {thing}s.",
)

SKILLS = ("stories", "smalltalk", "sums", "repeat", "remember", "about_localrun", "unknown")
WEIGHTS = (7, 12, 13, 24, 30, 10, 8)


def system_message(random: Random, memory: Memory) -> str | None:
    """A system message, or none; it may tell the user's name, or be long and of no use."""
    kind = random.random()
    if kind < P_SYSTEM_FACT:
        return remember.system_facts(random, memory)
    if kind < P_SYSTEM_FACT + P_SYSTEM_LONG:
        return "You are a helpful assistant. " + " ".join(random.choices(ANY_WORDS, k=random.randint(10, 120))) + "."
    if kind < P_SYSTEM:
        return random.choice(SYSTEM_MESSAGES).format(
            adjective=random.choice(ADJECTIVES), job=random.choice(JOBS), thing=random.choice(THINGS)
        )
    return None


def next_exchange(random: Random, skill: str, memory: Memory) -> Exchange:
    """One turn of `skill`."""
    match skill:
        case "stories":
            return stories.exchange(random)
        case "smalltalk":
            return smalltalk.exchange(random)
        case "sums":
            return sums.exchange(random)
        case "repeat":
            return repeat.exchange(random)
        case "remember":
            return remember.exchange(random, memory)
        case "about_localrun":
            return about_localrun.exchange(random)
        case _:
            return unknown.exchange(random)


def messages(random: Random) -> Iterator[Message]:
    """The messages of one conversation, without end. Some conversations lean on one skill, most mix all of them."""
    memory = Memory()
    system = system_message(random, memory)
    if system is not None:
        yield {"role": "system", "content": system}
    weights = list(WEIGHTS)
    if random.random() < 0.3:
        weights[random.randrange(len(SKILLS))] += 60
    while True:
        skill = random.choices(SKILLS, weights)[0]
        turn = next_exchange(random, skill, memory)
        yield {"role": "user", "content": turn.user}
        yield {"role": "assistant", "content": turn.assistant}
