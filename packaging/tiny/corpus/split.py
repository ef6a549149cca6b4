"""The held-out split: a fixed hash decides, for each skill, which names, phrases and combinations training never sees.

Pure. A key is held out when its checksum falls into one class of `HELD_OUT_ONE_IN`; nothing is drawn at random, so the
split is the same in every run, and a generator that asks for one side can never produce the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from random import Random
from typing import TypeVar

HELD_OUT_ONE_IN = 8

Drawn = TypeVar("Drawn")


def is_held_out(skill: str, key: str) -> bool:
    """Whether `key` (compared without case) belongs to the held-out side of `skill`."""
    return zlib.crc32(f"{skill}:{key.lower()}".encode()) % HELD_OUT_ONE_IN == 0


def draw(
    random: Random, skill: str, held_out: bool, make: Callable[[Random], Drawn], key: Callable[[Drawn], str]
) -> Drawn:
    """Draws from `make` until the result lies on the asked side of the split (eight draws on average at worst)."""
    while True:
        drawn = make(random)
        if is_held_out(skill, key(drawn)) == held_out:
            return drawn
