"""Real pictures in the terminals that have kitty's graphics protocol with Unicode placeholders: kitty from 0.28 on, and
Ghostty; also inside tmux, where it lets sequences through (`allow-passthrough`).

A picture is sent once, under a number. Wherever a placeholder character is written afterwards, in a colour that is this
number, the terminal draws the piece of the picture that two combining characters name: its row and its column. So
pictures are text to everything between here and the terminal, and scroll, move and are cut off as text is.

Elsewhere placeholders are boxes, so they are used only where they are known to work. `is_named` is what the environment
says; that the terminal is new enough too is known when it reports its size in band (DEC mode 2048), which textual asks
for anyway: kitty learned that after placeholders. So no question of our own waits for an answer, or finds one among the
keys. Inside tmux, tmux knows what is outside of it.

Does not: decode pictures, or know widgets.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Mapping

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from localrun.processes import run_text

_PLACEHOLDER = "\U0010eeee"
# What kitty's rowcolumn-diacritics.txt begins with: the number of a row or a column is the place of its character.
_NUMBERS = (
    "\u0305\u030d\u030e\u0310\u0312\u033d\u033e\u033f\u0346\u034a\u034b\u034c\u0350\u0351\u0352\u0357\u035b\u0363"
    "\u0364\u0365\u0366\u0367\u0368\u0369\u036a\u036b\u036c\u036d\u036e\u036f\u0483\u0484\u0485\u0486\u0487\u0592"
    "\u0593\u0594\u0595\u0597"
)
MAX_COLUMNS = MAX_ROWS = len(_NUMBERS)
MAX_NUMBER = 0xFFFFFF
_CHUNK_CHARACTERS = 4096
_QUIETLY = "q=2"  # an answer would arrive as keys

_TERMS = ("xterm-kitty", "xterm-ghostty")
# The first versions with placeholders.
_VERSIONS = {"kitty": (0, 28), "ghostty": (1, 0)}
_TMUX_TIMEOUT_S = 2.0
_USUAL_CELL = (10, 20)


# --- what the terminal is sent ---


def placeholders(number: int, columns: int, rows: int) -> list[Strip]:
    """The picture with this number, as text."""
    style = Style(color=Color.from_rgb(number >> 16, number >> 8 & 0xFF, number & 0xFF))
    return [
        Strip([Segment("".join(_PLACEHOLDER + _NUMBERS[row] + _NUMBERS[x] for x in range(columns)), style)], columns)
        for row in range(rows)
    ]


def has_placeholders(text: str) -> bool:
    return _PLACEHOLDER in text


def shown(number: int, png: bytes, columns: int, rows: int) -> str:
    """Makes the placeholders of a number be this picture, which is fitted into so many cells."""
    content = base64.b64encode(png).decode("ascii")
    chunks = [content[at : at + _CHUNK_CHARACTERS] for at in range(0, len(content), _CHUNK_CHARACTERS)]
    keys = f"a=T,U=1,i={number},f=100,c={columns},r={rows},{_QUIETLY}"
    return "".join(
        _sequence(f"{keys if at == 0 else _QUIETLY},m={int(at + 1 < len(chunks))};{chunk}")
        for at, chunk in enumerate(chunks)
    )


def removed(number: int) -> str:
    """Makes the terminal forget a picture."""
    return _sequence(f"a=d,d=I,i={number},{_QUIETLY}")


def _sequence(command: str) -> str:
    sequence = f"\x1b_G{command}\x1b\\"
    if "TMUX" in os.environ:
        return "\x1bPtmux;{}\x1b\\".format(sequence.replace("\x1b", "\x1b\x1b"))
    return sequence


def cell_pixels() -> tuple[int, int]:
    """Width and height of a cell; the usual ones where the terminal does not say."""
    if sys.platform == "win32" or sys.__stdin__ is None:
        return _USUAL_CELL
    import fcntl
    import struct
    import termios

    try:
        size = fcntl.ioctl(sys.__stdin__.fileno(), termios.TIOCGWINSZ, bytes(8))
    except (OSError, ValueError):
        return _USUAL_CELL
    rows, columns, width, height = struct.unpack("HHHH", size)
    return (width // columns, height // rows) if rows and columns and width and height else _USUAL_CELL


# --- whether it understands that ---


def is_named(environment: Mapping[str, str]) -> bool:
    """Whether the environment says that this is kitty or Ghostty, without tmux or another program between."""
    term = environment.get("TERM", "")
    is_inside = "KITTY_WINDOW_ID" in environment or environment.get("TERM_PROGRAM") == "ghostty"
    return "TMUX" not in environment and (term in _TERMS or (is_inside and "xterm" in term))


def is_outside_of_tmux(environment: Mapping[str, str]) -> bool:
    """Whether tmux runs here, in such a terminal, and lets pictures and their colours through. Asks tmux."""
    if "TMUX" not in environment:
        return False
    asked = "#{allow-passthrough} #{client_termname},#{client_termfeatures} #{client_termtype}"
    command = ["tmux", "display-message", "-p", "-t", environment.get("TMUX_PANE", ""), asked]
    try:
        ended = run_text(command, _TMUX_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = re.match(r"(?:1|2|on|all) (\S+) (\w+)[ (](\d+)\.(\d+)", ended.stdout)
    if found is None or not {*_TERMS, "RGB"} & {*found[1].split(",")}:  # the terminfo of the former has all colours
        return False
    needed = _VERSIONS.get(found[2].lower())
    return needed is not None and (int(found[3]), int(found[4])) >= needed
