"""Surface variation of what users type: casing, punctuation, politeness. Pure.

Works on a template with `{slots}`: only the fixed words change, what goes into a slot is kept exactly as given.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

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
