"""`packaging/localrun.1`: the manual page, in roff, from the same commands.

It has no date, so that the same program gives the same page.
"""

from __future__ import annotations

import command_tree

from localrun import __version__, config
from localrun.cli import exits

FILES = (
    ("data folder", "models, manifests, chats"),
    ("cache folder", "the state of prompts, for later"),
    ("configuration folder", "localrun.toml, tui.toml"),
    ("state folder", "daemon.log"),
)


def text() -> str:
    """The page."""
    root, *commands = command_tree.entries()
    lines = [
        f'.TH LOCALRUN 1 "" "localrun {__version__}" "User Commands"',
        ".SH NAME",
        r"localrun \- run language models on this machine",
        ".SH SYNOPSIS",
        f".B {_roff(root.usage)}",
        ".SH DESCRIPTION",
    ]
    for paragraph in root.paragraphs:
        lines += [".PP", *_paragraph(paragraph)]
    lines += _options(root)
    lines.append(".SH COMMANDS")
    for entry in commands:
        lines += [f'.SS "{_roff(entry.usage)}"']
        for paragraph in entry.paragraphs:
            lines += [*_paragraph(paragraph), ".PP"]
        lines += _options(entry)
    lines.append(".SH ENVIRONMENT")
    lines += _item("LOCALRUN_HOME", "The data, cache, configuration and state folders lie below it.")
    for field in config.FIELDS:
        lines += _item(config.env_name(field), config.help_texts()[field] + ".")
    lines.append(".SH FILES")
    for name, what in FILES:
        lines += _item(name, what + ".")
    lines.append(".SH EXIT STATUS")
    for code, meaning in exits.MEANINGS.items():
        lines += _item(str(code), meaning + ".")
    return "\n".join(lines) + "\n"


def _options(entry: command_tree.Entry) -> list[str]:
    return [line for name, what in entry.options if what for line in _item(name, what)]


def _item(name: str, what: str) -> list[str]:
    return [".TP", f".B {_roff(name)}", _roff(what)]


def _paragraph(paragraph: str) -> list[str]:
    if paragraph.startswith("    "):
        return [".nf", *(_roff(line) for line in paragraph.splitlines()), ".fi"]
    return [_roff(paragraph)]


def _roff(text: str) -> str:
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("\n", " ").replace('"', r"\(dq")
    # A line must not begin as a request does.
    return r"\&" + escaped if escaped[:1] in (".", "'") else escaped
