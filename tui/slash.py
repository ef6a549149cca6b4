"""Slash commands: what may be typed at the beginning of the prompt instead of a question, and how one may go on that is
being typed: its name, and its argument where there is a list to choose from.

Does not: carry them out (`screens/chat_commands.py`), or show how they go on (`widgets/prompt.py`).
"""

from __future__ import annotations

import asyncio
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from localrun.errors import LocalrunError, meant
from localrun.tui import short_text
from localrun.tui.conversation import Conversation
from localrun.tui.daemon import Daemon

COMMANDS: dict[str, tuple[str, str]] = {
    "new": ("", "begin a new chat"),
    "chats": ("[WORDS]", "open an earlier chat, or search in all of them"),
    "title": ("TEXT", "name this chat"),
    "model": ("[NAME]", "answer with another model from now on"),
    "system": ("[TEXT]", "set this chat's system prompt; without text, remove it"),
    "set": ("[NAME VALUE]", "set a parameter (temperature, …); without a value, show them"),
    "unset": ("NAME", "take the model's own value for a parameter"),
    "think": ("LEVEL", "on, off, low, medium, high: whether a model that can think does"),
    "tools": ("[on|off]", "the tools of this chat: what is on, what was allowed"),
    "retry": ("", "answer the last question again"),
    "edit": ("", "change the last question and ask it again"),
    "branch": ("", "go on in a copy of this chat"),
    "beside": ("", "a second chat beside this one, or back to one"),
    "attach": ("FILE…", "send pictures, sounds or texts with the next question"),
    "paste": ("", "attach the picture in the clipboard"),
    "detach": ("[FILE]", "do not send it after all; without a name, the last one"),
    "copy": ("", "copy the last answer"),
    "code": ("", "copy the last code block"),
    "export": ("[FILE]", "write this chat to a file, .md or .json"),
    "editor": ("", "write the prompt in $EDITOR"),
    "help": ("", "all keys and commands"),
    "quit": ("", "leave; the daemon and its models stay"),
}
"""Name to (arguments, what it does), in the order of the help."""


THINK_LEVELS: dict[str, bool | str] = {"on": True, "off": False, "low": "low", "medium": "medium", "high": "high"}


class Slash(NamedTuple):
    """A command as it was typed; `argument` is the rest of the text."""

    name: str
    argument: str


def parse(text: str) -> Slash | None:
    """The command that a text begins with, which may be unknown; None for a question. `//` begins a question with a
    slash, and so does a slash before anything else than a letter."""
    if not text.startswith("/") or not text[1:2].isalpha():
        return None
    name, *rest = text[1:].split(maxsplit=1)
    return Slash(name.lower(), rest[0].strip() if rest else "")


def unescaped(text: str) -> str:
    """A question as it is meant: of two slashes at its beginning one is left out."""
    return text[1:] if text.startswith("//") else text


def suggestions(text: str) -> list[str]:
    """Commands that begin with what was typed so far; none once there is an argument."""
    if not text.startswith("/") or " " in text:
        return []
    return [name for name in COMMANDS if name.startswith(text[1:].lower())]


def option(name: str, text: str, known: Mapping[str, Any]) -> Any:
    """The value of an option from its text. `known` are the schemas of all of them, by name. Raises ValueError saying
    which there are, or what the value must be."""
    if name not in known:
        way_out = meant(name, known) or f"they are {', '.join(known)}"
        raise ValueError(f"{name} is no parameter; {way_out}")
    schemas = known[name].get("anyOf", [known[name]])
    words = [word for schema in schemas for word in schema.get("enum", ())]
    if text.lower() in words:
        return text.lower()
    choices = [schema for schema in schemas if schema.get("type", "null") != "null"]
    kind, value = choices[0]["type"], value_of(text)
    if kind == "string":
        return text
    if kind == "boolean":
        is_valid, wanted = isinstance(value, bool), ", ".join([*words, "true or false"])
    else:
        limits = {limit: choices[0][limit] for limit in _LIMITS if limit in choices[0]}
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_valid = is_number and all(_LIMITS[limit].holds(value, bound) for limit, bound in limits.items())
        shown = " and ".join(f"{_LIMITS[limit].words} {_short(bound)}" for limit, bound in limits.items())
        wanted = f"a number {shown}".rstrip()
    if not is_valid:
        raise ValueError(f"{name} is {text!r}, but must be {wanted}")
    return value


class _Limit(NamedTuple):
    words: str
    holds: Callable[[Any, Any], bool]


# Of JSON schema.
_LIMITS = {
    "minimum": _Limit("at least", operator.ge),
    "exclusiveMinimum": _Limit("above", operator.gt),
    "maximum": _Limit("at most", operator.le),
}


def _short(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def value_of(text: str) -> Any:
    """A parameter's value from its text: a number, true or false, or the text itself."""
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# Of a folder; a person types another letter rather than read more.
MAX_FILES = 200


class Completion(NamedTuple):
    """`text` is the whole prompt with it, `shown` what is listed, and `what` a few words about it."""

    text: str
    shown: str
    what: str = ""


async def completions(text: str, daemon: Daemon, conversation: Conversation, files: Iterable[str]) -> list[Completion]:
    """None for what is no command, or takes anything. `files` are the names of those that are attached."""
    names = suggestions(text)
    if names:
        return [_command(name) for name in names]
    command = parse(text)
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
    arguments, what = COMMANDS[name]
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
    words = {"think": THINK_LEVELS, "tools": ("on", "off"), "detach": files}.get(name, ())
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
