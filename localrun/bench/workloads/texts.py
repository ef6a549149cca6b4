"""Texts for the workloads that drafts may help or must not harm: Python files, lists and records from a seed.

Made and not stored, so that no server has seen the text of another round. All are plain ASCII.
"""

from __future__ import annotations

import random
import re
import tomllib
from functools import cache
from importlib import resources
from typing import NamedTuple

import msgspec


class _Material(msgspec.Struct, frozen=True):
    """What `texts.toml` has. Functions and tasks are formats: two nouns or three, an adjective, a city and a number."""

    nouns: list[str]
    adjectives: list[str]
    cities: list[str]
    tasks: list[str]
    functions: list[str]


@cache
def _material() -> _Material:
    content = resources.files("localrun.bench.workloads").joinpath("texts.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(content), _Material)


class SourceFile(NamedTuple):
    """`head` is what comes before the first definition; `names` are those of the definitions."""

    head: str
    text: str
    names: list[str]


def source_file(chosen: random.Random) -> SourceFile:
    """A Python file of some 160 lines in which no definition is like another: small models lose their way among those
    that are."""
    of = _material()
    nouns = chosen.sample(of.nouns, 3 * len(of.functions))
    head = f'"""The {chosen.choice(of.adjectives)} {nouns[0]} report."""\n\nimport os\nimport re\n'
    parts, names = [head], []
    for function in chosen.sample(of.functions, len(of.functions)):
        words = {"noun": nouns.pop(), "other": nouns.pop(), "third": nouns.pop()}
        parts.append(function.format(**words, adjective=chosen.choice(of.adjectives), n=chosen.randrange(2, 90)))
        names += _DEFINED.findall(parts[-1])[:1]
    return SourceFile(head, "\n\n".join(parts), names)


_DEFINED = re.compile(r"^(?:async )?(?:def|class) (\w+)", re.MULTILINE)


def listing(chosen: random.Random) -> str:
    """Things to do, one a line, in sentences of which no two are alike, for the same reason."""
    of = _material()
    nouns = chosen.sample(of.nouns, 2 * len(of.tasks))
    lines = []
    for task in chosen.sample(of.tasks, len(of.tasks)):
        words = {
            "adjective": chosen.choice(of.adjectives),
            "city": chosen.choice(of.cities),
            "n": chosen.randrange(2, 90),
        }
        lines.append(f"- {task.format(noun=nouns.pop(), other=nouns.pop(), **words)}\n")
    return "".join(lines)


def records(chosen: random.Random) -> tuple[str, dict[str, object]]:
    """Records as lines of text, and the schema of a list of as many objects."""
    of = _material()
    lines = [
        f"{noun}: {chosen.choice(of.adjectives)}, {chosen.randrange(10, 990)} pieces, from {chosen.choice(of.cities)}\n"
        for noun in chosen.sample(of.nouns, N_RECORDS)
    ]
    text: dict[str, object] = {"type": "string", "maxLength": 16}
    fields = {"name": text, "kind": text, "pieces": {"type": "integer", "minimum": 0, "maximum": 999}, "city": text}
    one = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return "".join(lines), {"type": "array", "items": one, "minItems": N_RECORDS, "maxItems": N_RECORDS}


N_RECORDS = 8


def topic(chosen: random.Random) -> str:
    """What a story may be about."""
    of = _material()
    first, second = chosen.sample(of.nouns, 2)
    return f"a {chosen.choice(of.adjectives)} {first} and a {second} in {chosen.choice(of.cities)}"
