"""How a slash command that is being typed may go on: its name, and its argument where there is a list to choose from.

Does not: show them (`widgets/prompt.py`), or know what a command does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from localrun.errors import LocalrunError
from localrun.tui import short_text, slash
from localrun.tui.conversation import Conversation
from localrun.tui.daemon import Daemon

# Of a folder; a person types another letter rather than read more.
MAX_FILES = 200


class Completion(NamedTuple):
    """`text` is the whole prompt with it, `shown` what is listed, and `what` a few words about it."""

    text: str
    shown: str
    what: str = ""


async def completions(text: str, daemon: Daemon, conversation: Conversation, files: Iterable[str]) -> list[Completion]:
    """None for what is no command, or takes anything. `files` are the names of those that are attached."""
    names = slash.suggestions(text)
    if names:
        return [_command(name) for name in names]
    command = slash.parse(text)
    if command is None or "\n" in text or " " not in text:
        return []
    head, _, argument = text.partition(" ")
    if command.name == "attach":
        return await asyncio.to_thread(_paths, head, argument)
    try:
        choices = await _choices(command.name, daemon, conversation, files)
    except LocalrunError:
        return []  # the banner says why; the command itself will, too
    end = " " if command.name == "set" else ""
    return [
        Completion(f"{head} {name}{end}", name, what)
        for name, what in choices
        if name.lower().startswith(argument.lower())
    ]


def _command(name: str) -> Completion:
    arguments, what = slash.COMMANDS[name]
    return Completion(f"/{name} " if arguments else f"/{name}", f"/{name} {arguments}", what)


async def _choices(
    name: str, daemon: Daemon, conversation: Conversation, files: Iterable[str]
) -> list[tuple[str, str]]:
    if name == "model":
        return [(str(row["name"]), short_text.size(row.get("size"))) for row in await daemon.models()]
    if name == "set":
        return [(option, str(schema.get("description", ""))) for option, schema in (await daemon.options()).items()]
    if name == "unset":
        return [(option, f"now {value}") for option, value in conversation.model_parameters.items()]
    words = {"think": slash.THINK_LEVELS, "tools": ("on", "off"), "detach": files}.get(name, ())
    return [(word, "") for word in words]


def _paths(head: str, argument: str) -> list[Completion]:
    """What is in the folder that was typed so far; hidden files only where a dot was typed."""
    before, _, begun = argument.rpartition("/")
    folder = Path(f"{before}/" if "/" in argument else ".").expanduser()
    try:
        with os.scandir(folder) as entries:
            found = sorted(
                f"{entry.name}/" if entry.is_dir() else entry.name
                for entry in entries
                if entry.name.startswith(begun) and (begun.startswith(".") or not entry.name.startswith("."))
            )
    except (OSError, ValueError):
        return []
    typed = argument[: len(argument) - len(begun)]
    return [Completion(f"{head} {typed}{name}", name) for name in found[:MAX_FILES]]
