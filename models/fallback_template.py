"""Chat templates for model files that bring none.

What the vocabulary has tells the format better than the architecture does: a Llama fine-tuned with `<|im_start|>`
writes ChatML. So control tokens are asked first, then the architecture, and ChatML is the last resort, since most
models have seen it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

_LAST_RESORT = "ChatML"


class _Template(NamedTuple):
    name: str
    tokens: list[str]
    architectures: list[str]
    jinja: str


@cache
def _templates() -> list[_Template]:
    content = resources.files("localrun.models").joinpath("fallback_templates.toml").read_text(encoding="utf-8")
    return [_Template(**entry) for entry in tomllib.loads(content)["template"]]


def by_marks(text: str | Collection[str]) -> str:
    """The template whose marks are among these tokens, or in this text; "" for none."""
    return next((each.jinja for each in _templates() if each.tokens and all(mark in text for mark in each.tokens)), "")


def fallback_template(architecture: str, control_tokens: Sequence[str] = ()) -> str:
    """The template for a model file that brings none."""
    if template := by_marks(frozenset(control_tokens)):
        return template
    for each in _templates():
        if architecture.startswith(tuple(each.architectures)):
            return each.jinja
    return next(each.jinja for each in _templates() if each.name == _LAST_RESORT)


def name_of(template: str) -> str:
    """What people call one of these templates."""
    return next(each.name for each in _templates() if each.jinja == template)
