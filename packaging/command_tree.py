"""Every command of `localrun`, as click knows it: what the command page and the manual page are written from.

Does not: write anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import click

from localrun.cli.root import cli

_BELL = "\b"


@dataclass(frozen=True)
class Entry:
    """One command: its words, such as `localrun cache clear`, how it is used, its text and examples, and its options'
    lines."""

    path: str
    usage: str
    paragraphs: tuple[str, ...]
    options: tuple[tuple[str, str], ...]


def entries() -> Iterator[Entry]:
    """The root command first, then the others in the order in which `--help` lists them, groups before their parts."""
    yield from _below(cli, click.Context(cli, info_name="localrun"))


def _below(command: click.Command, context: click.Context) -> Iterator[Entry]:
    records = [record for param in command.get_params(context) if (record := param.get_help_record(context))]
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    paragraphs = [*_paragraphs(command.help or "")]
    if context.parent is not None and command.epilog:
        paragraphs += _paragraphs(command.epilog)
    yield Entry(context.command_path, usage, tuple(paragraphs), tuple(records))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            part = command.get_command(context, name)
            if part is None or part.hidden:
                continue
            yield from _below(part, click.Context(part, info_name=name, parent=context))


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs on one line each; what click is told not to wrap keeps its lines and gets four spaces in front."""
    for block in re.split(r"\n\s*\n", text.partition("\f")[0].strip()):
        lines = [line.strip() for line in block.splitlines()]
        if lines and lines[0] == _BELL:
            yield "\n".join("    " + line for line in lines[1:])
        else:
            yield " ".join(line for line in lines if line)
