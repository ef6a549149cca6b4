"""Where files lie is the business of who runs the daemon: others are told the files' names.

Pure, but for the folders of this process, which are looked up once. Paths are known by their form, and those in the
daemon's own folders also where they have spaces in them. Routes of the API are left alone.
Does not: change what clients send, models say, or a model has of its own.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from localrun.config import folders

_ROUTES = r"(?!/(?:v1|api|localrun/v1|slots|docs|web)\b)"
_BEGINNING = r"(?:~?/|[A-Za-z]:[\\/])"
_PART = r"[^\s/\\'\",;()<>{}|*]"
_QUOTED = rf"(?<=['\"]){_ROUTES}{_BEGINNING}[^'\"\n]+(?=['\"])"
_PLAIN = rf"(?<![\w.:/\\~+<-]){_ROUTES}{_BEGINNING}{_PART}+[/\\](?:{_PART}|[/\\])*"
_WHOLE = re.compile(rf"{_ROUTES}{_BEGINNING}(?:(?![:;,] )[^\n])+")

# What of a model's own is shown as it is, by its field.
_OF_MODELS = frozenset(
    ("chat_template", "license", "messages", "model_info", "modelfile", "parameters", "projector_info", "system",
     "template", "tensors")
)  # fmt: skip


def without_paths(text: str) -> str:
    """The text with the name of each file and folder in place of its path."""
    if _WHOLE.fullmatch(text) and "/" in text[1:].replace("\\", "/"):
        return _name(text)
    return _pattern().sub(lambda found: _name(found[0]), text)


def without_paths_in(value: Any) -> Any:
    """The same of all texts in what JSON is made of, but for those that are the models' own."""
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, dict):
        return {key: each if key in _OF_MODELS else without_paths_in(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths_in(each) for each in value]
    return value


def _name(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


@functools.cache
def _pattern() -> re.Pattern[str]:
    own = folders()
    roots = {str(folder) for folder in (own.data, own.cache, own.config, own.state, Path.home())}
    known = "|".join(re.escape(root) for root in sorted(roots, key=len, reverse=True) if len(root) > 1)
    return re.compile(rf"{_QUOTED}|(?:{known})(?:{_PART}|[/\\])*|{_PLAIN}")
