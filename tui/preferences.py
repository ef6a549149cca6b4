"""A person's own choices for the interface, from `tui.toml` in the configuration folder:

    theme = "localrun-light"

    [keys]
    "chat.new" = "f7"
    "monitor.cancel" = "k,delete"

Read once at the start. What is wrong in the file is left out, and said; the rest counts.

Does not: write the file.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from localrun.tui.keys import KEYS


class Preferences(NamedTuple):
    """`theme` None is the usual one. `problems` are sentences for the person."""

    theme: str | None = None
    keys: dict[str, str] = {}  # noqa: RUF012 - nobody changes it
    problems: tuple[str, ...] = ()


def load(path: Path) -> Preferences:
    """Never raises; a file that is not there is no problem."""
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except FileNotFoundError:
        return Preferences()
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return Preferences(problems=(f"{path} cannot be read: {error}",))
    unknown = sorted(content.keys() - {"theme", "keys"})
    problems = [f"{path.name}: {name!r} is unknown; there are theme and keys" for name in unknown]
    theme = content.get("theme")
    if theme is not None and not isinstance(theme, str):
        problems.append(f"{path.name}: theme must be a text")
        theme = None
    table = content.get("keys", {})
    keys: dict[str, str] = {}
    if not isinstance(table, dict):
        problems.append(f"{path.name}: keys must be a table")
        table = {}
    for name, value in table.items():
        if name not in KEYS:
            problems.append(f"{path.name}: keys has {name!r}, which is none of {', '.join(KEYS)}")
        elif not isinstance(value, str) or not value.strip():
            problems.append(f"{path.name}: the key of {name!r} must be a text such as ctrl+t")
        else:
            keys[name] = value.strip()
    return Preferences(theme, keys, tuple(problems))
