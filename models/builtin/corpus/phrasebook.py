"""Reads the phrase tables of the skills: blocks of ways to ask, each with its answers. Pure.

A block is a paragraph. Ways to ask are separated by ` | ` and may go over several lines; every line that begins with
`= ` is one answer, and a line that begins with `  ` continues it.
"""

from __future__ import annotations

from typing import NamedTuple


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
