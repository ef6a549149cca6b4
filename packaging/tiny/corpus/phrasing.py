"""How users type, and the phrase tables that say what: shared by all skills. Pure.

`say` varies the surface of a template with `{slots}` (casing, punctuation, politeness): only the fixed words change,
what goes into a slot is kept exactly as given. A phrase table is a text of blocks. A block is a paragraph: ways to ask,
separated by ` | ` over any number of lines, then the answers, each on a line that begins with `= ` and continued by
lines that begin with two blanks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import NamedTuple


class Exchange(NamedTuple):
    """One turn of the user and the model's answer to it."""

    user: str
    assistant: str


OPENERS = ("hey, ", "hi, ", "ok, ", "okay, ", "please ", "so, ", "well, ", "hello, ", "now ", "and ", "hmm, ", "um, ")
CLOSERS = (" please", " please?", ", please.", " :)", " thanks", "?", "!", "!!", "??", ".", "...")
SLOT = re.compile(r"(\{\w+\})")


def say(random: Random, template: str, **slots: str) -> str:
    """One way to type `template`, with its `{slots}` filled in; a final slot gets nothing after it."""
    text = template
    ends_in_slot = text.endswith("}")
    if random.random() < 0.12:
        text = random.choice(OPENERS) + text
    style = random.random()
    if style < 0.25:
        text = cased(text, str.lower)
    elif style < 0.28:
        text = cased(text, str.upper)
    elif style < 0.75:
        text = text[0].upper() + text[1:]
    if not ends_in_slot:
        ending = random.random()
        if ending < 0.3:
            text = text.rstrip("?.! ")
        elif ending < 0.36:
            text = text.rstrip("?.! ") + random.choice(CLOSERS)
    return text.format(**slots) if slots else text


def cased(template: str, change: Callable[[str], str]) -> str:
    """Applies `change` to the fixed words of `template` and leaves its slots alone."""
    parts = SLOT.split(template)
    return "".join(part if SLOT.fullmatch(part) else change(part) for part in parts)


def recased(random: Random, text: str, p_lower: float = 0.2, p_upper: float = 0.04) -> str:
    """`text` as some users would type it: mostly as it is, sometimes all lower or all upper case."""
    style = random.random()
    if style < p_lower:
        return text.lower()
    return text.upper() if style < p_lower + p_upper else text


class Entry(NamedTuple):
    """Ways to ask one thing, and the answers that fit all of them."""

    questions: tuple[str, ...]
    answers: tuple[str, ...]


def phrases(text: str) -> tuple[str, ...]:
    """`a | b` over any number of lines, as a tuple."""
    found = (phrase.strip() for line in text.strip().splitlines() for phrase in line.split(" | "))
    return tuple(phrase.removesuffix(" |") for phrase in found if phrase not in ("", "|"))


def entries(text: str) -> tuple[Entry, ...]:
    """All blocks of `text`, in their order."""
    return tuple(entry(block) for block in text.strip().split("\n\n"))


def entry(block: str) -> Entry:
    """One block."""
    asked: list[str] = []
    answers: list[str] = []
    for line in block.strip("\n").splitlines():
        if line.startswith("= "):
            answers.append(line.removeprefix("= "))
        elif line.startswith("  "):
            answers[-1] += " " + line.strip()
        else:
            asked.append(line)
    return Entry(phrases("\n".join(asked)), tuple(answers))
