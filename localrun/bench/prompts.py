"""Prompts made of numbers: the same seed gives the same prompt on every server, another label another prompt.

A prompt is a list of numbers below 1,000, which a Wording turns into what the server understands: token ids where it
takes them, so that a prompt has exactly as many tokens as it should, else words.

Pure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

N_NUMBERS = 1000

# Ids below are control tokens and bytes in most vocabularies.
_FIRST_ID = 300
_FIRST_BYTE, _N_BYTES = 33, 94
# Each of them is one token in the usual vocabularies.
_WORDS = ("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with")


class Wording(StrEnum):
    """How numbers become a prompt, the most exact way first."""

    IDS = "token ids"
    LOW_IDS = "token ids below 128"
    TEXT = "text"

    def prompt(self, numbers: Sequence[int]) -> list[int] | str:
        """The value of the field `prompt`."""
        if self is Wording.IDS:
            return [_FIRST_ID + number for number in numbers]
        if self is Wording.LOW_IDS:
            return [_FIRST_BYTE + number % _N_BYTES for number in numbers]
        return " ".join(_WORDS[number % len(_WORDS)] for number in numbers)


def numbers(seed: int, label: str, count: int) -> list[int]:
    """`count` numbers below N_NUMBERS that belong to `seed` and `label`."""
    chosen = random.Random(f"{seed}/{label}")
    return [chosen.randrange(N_NUMBERS) for _ in range(count)]
