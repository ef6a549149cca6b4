"""Names of models: the one that a mistyped name is close to, and what to do with one that has just come.

Does not: start a daemon.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrun import errors
from localrun.cli.daemon import ask, base_url
from localrun.config import Settings, in_short

if TYPE_CHECKING:
    from localrun.client import Client

# A prefix that is shorter says little of what was meant.
_PREFIX = 3
# What these do can only be done to a model that is here.
_ONLY_HERE = frozenset({"cp", "rm", "stop", "push", "clear"})


def explained(error: errors.ModelNotFound, settings: Settings) -> errors.LocalrunError:
    """The error with a way out: a name that is close to this one, or how to look for it."""
    name = error.name
    if not name or error.reason:
        return error
    if os.path.isabs(name):
        return error if Path(name).exists() else _not_found(f"there is no file {name}")
    context = click.get_current_context(silent=True)
    only_here = context is not None and context.info_name in _ONLY_HERE
    alike, is_here = _alike(name, settings, only_here=only_here)
    if not alike and only_here:
        return error
    # `run` has asked the library.
    is_asked = "/" in name or (context is not None and context.info_name == "run")
    library = "" if is_asked else f", and `localrun pull {name}` gets it if Ollama's library has it"
    if not alike:
        search = f"`localrun list` shows what is here, `localrun search {name}` looks for it elsewhere{library}"
        return _not_found(f"model '{name}' not found; {search}")
    pull = "" if is_here else f" `localrun pull {alike}` downloads it{library}"
    return _not_found(f"model '{name}' not found; did you mean '{alike}'?{pull}")


def guessed(error: errors.LocalrunError, name: str, settings: Settings) -> errors.LocalrunError:
    """What became of a pull, with a name that is close to a short one that is not in the catalogue."""
    if "/" in name or ask(base_url(settings), lambda client: client.catalog(name)):
        return error
    alike, _ = _alike(name, settings, only_here=False)
    return errors.by_code(error.code, f"{error.message}; did you mean '{alike}'?") if alike else error


async def next_step(client: Client, name: str) -> str:
    """What to do with a model that has just come, in one line."""
    shown, name = await client.show(name), shlex.quote(name)
    if "kind" in (shown.get("localrun") or {}):
        return f"use it with a model: `localrun run MODEL+{name}`"
    if "completion" in (shown.get("capabilities") or ()):
        return f"chat with it: `localrun run {name}`"
    return f"see what it is for: `localrun show {name}`"


def _not_found(message: str) -> errors.LocalrunError:
    return errors.by_code(errors.ModelNotFound.code, message)


def _alike(name: str, settings: Settings, *, only_here: bool) -> tuple[str, bool]:
    """The name that is meant, and whether that model is here."""
    with contextlib.suppress(errors.LocalrunError):
        store = ask(base_url(settings), lambda client: client.store())
        here = [in_short(row["name"]) for row in [*store["models"], *store.get("adapters", ())]]
        if found := closest(name, here):
            return found, True
        if not only_here:
            entries = ask(base_url(settings), lambda client: client.catalog())
            return closest(name, [entry["name"] for entry in entries]), False
    return "", False


def closest(name: str, names: Iterable[str]) -> str:
    """The first name that begins with this one, else the one that is most alike, with or without its tag; or none."""
    known: dict[str, str] = {}
    for each in names:
        known.setdefault(each.lower(), each)
        known.setdefault(each.lower().partition(":")[0], each)
    wanted = name.lower()
    if version := re.sub(r"[^0-9]", "", wanted.partition(":")[0]):  # another one is another model, and no slip
        known = {each: of for each, of in known.items() if re.sub(r"[^0-9]", "", each.partition(":")[0]) == version}
    begun = [each for each in known if len(wanted) >= _PREFIX and each.startswith(wanted)]
    # Two letters of four that were exchanged are half of the name.
    alike = begun or difflib.get_close_matches(wanted, known, n=1, cutoff=0.5 if len(wanted) < 6 else 0.6)
    return known[alike[0]] if alike else ""
