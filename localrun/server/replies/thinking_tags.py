"""How a template's model marks its thinking, and how thinking is switched.

By what the template says, as for tool calls. Channels of gpt-oss are a format of their own (`harmony.py`).

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

# Opening and closing tag. The first pair of which a template knows either is its own.
_TAGS: tuple[tuple[str, str], ...] = (
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|think|>", "<|/think|>"),
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
)
# Marks round the answer proper, which are no part of it.
_ANSWER_MARKS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
_ANSWER_TAGS = "<response></response>"
# Few models are loaded at a time, and a client may send templates of a megabyte.
REMEMBERED_TEMPLATES = 8


@dataclass(frozen=True)
class ThinkingTags:
    """Thinking stands between `opening` and `closing`."""

    opening: str
    closing: str


@lru_cache(maxsize=REMEMBERED_TEMPLATES)
def thinking_tags(template: str) -> ThinkingTags | None:
    """None for a template that knows no thinking."""
    for opening, closing in _TAGS:
        if opening in template or closing in template:
            return ThinkingTags(opening, closing)
    return None


def takes_effort(template: str) -> bool:
    """Whether it knows low, medium and high thinking."""
    return "reasoning_effort" in template


def least_effort(template: str) -> str:
    """The word for no thinking; gpt-oss has none, and thinks little."""
    return next((word for word in ("no_think", "none") if f"'{word}'" in template or f'"{word}"' in template), "low")


def answer_marks(template: str) -> frozenset[str]:
    """Marks round an answer, which the reader of it does not want."""
    marks = {mark for mark in _ANSWER_MARKS if mark in template}
    if _ANSWER_TAGS in template:
        marks.update(("<response>", "</response>"))
    return frozenset(marks)


def is_open(prompt_end: str, tags: ThinkingTags) -> bool:
    """Whether a prompt that ends so leaves thinking open."""
    return prompt_end.rstrip().endswith(tags.opening)


def is_closed(prompt_end: str, tags: ThinkingTags) -> bool:
    """Whether a prompt that ends so says that there was enough thinking."""
    return prompt_end.rstrip().endswith(tags.closing)
