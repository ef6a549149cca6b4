"""Where files lie is the business of who runs the daemon: others are told the files' names.

A path is known by where it begins: in one of the daemon's folders, in a folder that operating systems have at the top,
in somebody's home, on a drive or a share. Everything else that looks like one, such as the routes, references and
patterns that a client wrote, is left alone. Folders may have spaces in their names.

Pure, but for the daemon's folders, which it names once (`hide`), before the first request.
Does not: change what models say, or a model has of its own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

from localrun.config import folders

_AT_THE_TOP = frozenset(
    ("Applications", "Library", "System", "Users", "Volumes", "app", "bin", "boot", "dev", "etc", "home", "lib",
     "lib64", "media", "mnt", "nix", "opt", "private", "proc", "root", "run", "sbin", "snap", "srv", "sys", "tmp",
     "usr", "var")
)  # fmt: skip
_NO_PART = r"\s/\\'\"`,;()<>{}|*"
_PARTS = rf"(?:[^{_NO_PART}]|[/\\])+"
# A name that goes on after a space does so before the next slash, and is neither a file's nor a host's.
_MORE = rf"(?<!\.gguf)(?<!\.json)(?<!\.toml)(?:[ ][^{_NO_PART}:.]+){{1,3}}[/\\]"

# What of a model's own is shown as it is, by its field.
_OF_MODELS = frozenset(
    ("chat_template", "license", "messages", "model_info", "modelfile", "parameters", "projector_info", "system",
     "template", "tensors")
)  # fmt: skip

_own: set[Path] = set()


def hide(own: Iterable[Path]) -> None:
    """Folders of the daemon, besides those that it always has."""
    _own.update(own)
    _patterns.cache_clear()


def redact_paths(text: str) -> str:
    """The text with the name of each file and folder in place of its path."""
    whole, within = _patterns()
    if whole.fullmatch(text):
        return _name(text)
    return within.sub(lambda found: _name(found[0]), text)


def redact_paths_in(value: Any) -> Any:
    """The same of all texts in what JSON is made of, but for those that are the models' own."""
    if isinstance(value, str):
        return redact_paths(value)
    if isinstance(value, dict):
        return {key: each if key in _OF_MODELS else redact_paths_in(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [redact_paths_in(each) for each in value]
    return value


def _name(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Of a text that is a path, and of those within one."""
    always = folders()
    own = {always.data, always.cache, always.config, always.state, Path.home(), *_own}
    roots = {str(each) for one in own for each in (one.absolute(), one.resolve())} - {"/"}
    known = "|".join(re.escape(root) for root in sorted(roots, key=len, reverse=True))
    top = "|".join(map(re.escape, sorted(_AT_THE_TOP | {PurePath(root).parts[1] for root in roots if root[0] == "/"})))
    begins = rf"(?:~(?:[A-Za-z_]\w*)?/|/(?:{top})/|[A-Za-z]:[\\/]|\\\\\w)"
    quoted = "|".join(rf"(?<={quote}){begins}[^{quote}\n]+(?={quote})" for quote in "'\"`")
    plain = rf"(?:(?<=file://)|(?<![\w./\\~+<]))(?:(?:{known})(?=[/\\])|{begins}){_PARTS}(?:{_MORE}{_PARTS})*"
    return re.compile(rf"{begins}(?:(?![:;,] )[^\n])+"), re.compile(rf"{quoted}|{plain}")
