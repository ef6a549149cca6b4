"""Text for people: aligned columns, sizes and durations, and colours by meaning. What comes from elsewhere is made
harmless here: in `say`, `tell`, `aside`, `wrapped` and the cells of tables.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Generic, NamedTuple, Self, TextIO, TypeVar

from localrun.visible import visible, visible_json, visible_line

T = TypeVar("T")
_UNITS = ("B", "KB", "MB", "GB", "TB")


class TextStyle(StrEnum):
    """What a text is, as the terminal's number for how it looks."""

    TABLE_HEAD = "1"
    HEADING = "2"
    BAD = "31"
    GOOD = "32"
    DOUBTFUL = "33"


def painted(text: str, look: TextStyle, stream: TextIO | None = None) -> str:
    """The text for this stream, else for stdout; coloured on a terminal alone, and not with NO_COLOR or TERM=dumb."""
    is_plain = os.environ.get("NO_COLOR") or not obeys_sequences(stream or sys.stdout)
    return text if is_plain else f"\x1b[{look}m{text}\x1b[0m"


def obeys_sequences(stream: TextIO) -> bool:
    """Whether it is a terminal that can move its cursor; one without a name (an editor's, expect's) cannot."""
    kind = os.environ.get("TERM", "" if os.name == "posix" else "windows")
    return stream.isatty() and kind not in ("", "dumb")


_LABELS = {
    "error": TextStyle.BAD,
    "warning": TextStyle.DOUBTFUL,
    "not usable": TextStyle.DOUBTFUL,
    "note": TextStyle.HEADING,
}


def say(text: str) -> None:
    """Prose for a person on stdout."""
    print(wrapped(text), flush=True)


def progress(line: str) -> None:
    """Prose on stderr: how far things are, and what is no part of the answer."""
    print(wrapped(line, stream=sys.stderr), file=sys.stderr, flush=True)


def tell(label: str, message: str) -> None:
    """A line for a person on stderr, which begins with a label such as `error:`, in its colour."""
    begin = f"{label}:"
    text = wrapped(f"{begin} {message}", stream=sys.stderr)
    print(painted(begin, _LABELS[label], sys.stderr) + text.removeprefix(begin), file=sys.stderr)


def aside(message: str) -> None:
    """A line in parentheses on stderr, which stands back behind a conversation."""
    print(painted(wrapped(f"({message})", stream=sys.stderr), TextStyle.HEADING, sys.stderr), file=sys.stderr)


_STEP_PERCENT = 10


class LiveLine:
    """How far something is, on stderr: on a terminal one line that is written again and again, below what was said; in
    a log a line for each step. A context manager."""

    def __init__(self) -> None:
        self._is_terminal = obeys_sequences(sys.stderr)
        self._line = ""
        self._step: object = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._line:
            print(file=sys.stderr, flush=True)

    def show(self, line: str, percent: int, status: str = "") -> None:
        """In a log every status, and every ten percent of it."""
        if self._is_terminal:
            self._line = visible(line)[: shutil.get_terminal_size().columns - 1]
            self._write(self._line)
        elif (status, percent // _STEP_PERCENT) != self._step:
            self._step = (status, percent // _STEP_PERCENT)
            progress(line)

    def say(self, text: str) -> None:
        """What stays."""
        if self._is_terminal:
            self._write(f"{visible(text)}\n{self._line}")
        else:
            progress(text)

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns with two spaces between them."""
    lines = [header, *([visible_line(cell) for cell in row] for row in rows)]
    widths = [max(_n_cells(line[index]) for line in lines) for index in range(len(header))]
    padded = (
        "  ".join(cell + " " * (width - _n_cells(cell)) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    head, *body = (line.rstrip() for line in padded)
    return "\n".join((painted(head, TextStyle.TABLE_HEAD), *body))


def _n_cells(text: str) -> int:
    """How wide a terminal shows it: a Chinese character or an emoji takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


# A column with less room than this says nothing.
_LEAST = 12


class Column(NamedTuple, Generic[T]):
    """A column of a table: its head, and its cell of a row. Where a terminal has no room, those that `go` are left out,
    1 first; 0 never is. One that `is_cut` is made narrower where that is enough, so it must hold nothing that people
    copy."""

    head: str
    cell: Callable[[T], str]
    goes: int = 0
    is_cut: bool = False


def table(shown: Sequence[Column[T]], rows: Sequence[T]) -> str:
    """`columns` that fit the terminal. Elsewhere than in a terminal all are whole."""
    header = [column.head for column in shown]
    lines = [[visible_line(column.cell(row)) for column in shown] for row in rows]
    widths = {at: max(_n_cells(line[at]) for line in (header, *lines)) for at in range(len(header))}
    width = terminal_columns() if rows else 0
    for at in sorted((at for at, column in enumerate(shown) if column.goes), key=lambda at: shown[at].goes):
        excess = sum(widths.values()) + 2 * (len(widths) - 1) - width if width else 0
        if excess <= 0:
            break
        if shown[at].is_cut and widths[at] - excess >= _LEAST:
            widths[at] -= excess
        else:
            del widths[at]
    kept = [[_shortened(line[at], n_most) for at, n_most in widths.items()] for line in lines]
    return columns([header[at] for at in widths], kept)


def terminal_columns() -> int:
    """0 where the output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def _shortened(cell: str, n_most: int) -> str:
    if _n_cells(cell) <= n_most:
        return cell
    while _n_cells(cell) >= n_most:
        cell = cell[:-1]
    return cell + "…"


# More of a path than this is cut out of its middle on a terminal.
_PATH_CHARACTERS = 40


def short_path(text: str) -> str:
    """On a terminal, a long path without its middle: `~/.../model.gguf`. What is no path is itself."""
    if not (sys.stdout.isatty() and os.path.isabs(text)):
        return text
    home = os.path.expanduser("~")
    shown = "~" + text[len(home) :] if text.startswith(home + os.sep) else text
    first, *_, last = Path(shown).parts
    return shown if len(shown) <= _PATH_CHARACTERS else str(Path(first, "…", last))


def wrapped(text: str, *, indent: int = 0, stream: TextIO | None = None) -> str:
    """Prose in lines that fit the terminal, if the stream (else stdout) is one; all but the first are indented. Words
    stay whole, so that paths can be copied."""
    text = visible(text)
    if not (stream or sys.stdout).isatty():
        return text
    wrapper = textwrap.TextWrapper(
        max(20, shutil.get_terminal_size().columns - 1),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )
    return "\n".join("\n".join(wrapper.wrap(line)) for line in text.split("\n"))


def size(n_bytes: float) -> str:
    """Decimal units, as file managers and download pages use them: 1500000 is `1.5 MB`."""
    for unit in _UNITS:
        if n_bytes < 1000 or unit == _UNITS[-1]:
            return f"{n_bytes:.0f} {unit}" if n_bytes >= 10 or unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    raise AssertionError("the loop ends with the last unit")


def duration(seconds: float) -> str:
    """Short, with the unit that suits: `250 ms`, `1.25 s`, `2 min 5 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def ago(moment: datetime, now: datetime | None = None) -> str:
    """How long ago, in the largest unit."""
    elapsed = max((now or datetime.now(UTC)) - moment, timedelta())
    for unit, length in (("day", timedelta(days=1)), ("hour", timedelta(hours=1)), ("minute", timedelta(minutes=1))):
        count = elapsed // length
        if count:
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


def for_stdout(text: str) -> str:
    """What a program may read: `visible` when stdout is a terminal, else the text itself."""
    return visible(text) if sys.stdout.isatty() else text


def print_json(value: object) -> None:
    """Anything that msgspec encodes, indented."""
    import msgspec

    print(visible_json(msgspec.json.format(msgspec.json.encode(value)).decode()))


def one_line(value: object) -> str:
    """A load setting: a list with commas."""
    return ",".join(value) if isinstance(value, list) else str(value)
