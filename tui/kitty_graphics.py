"""Real pictures in the terminals that have kitty's graphics protocol with Unicode placeholders: kitty from 0.28 on, and
Ghostty; also inside tmux, where it lets sequences through (`allow-passthrough`).

A picture is sent once, under a number. Wherever a placeholder character is written afterwards, in a colour that is this
number, the terminal draws the piece of the picture that two combining characters name: its row and its column. So
pictures are text to everything between here and the terminal, and scroll, move and are cut off as text is.

A terminal is only asked what it is when its environment says that it answers. Where it cannot be known, the answer is
no: a terminal without placeholders shows boxes in their place.

Does not: decode pictures, or know widgets.
"""

from __future__ import annotations

import base64
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

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

# The first versions with placeholders.
_VERSIONS = {"kitty": (0, 28), "ghostty": (1, 0)}
_WHO_ARE_YOU = b"\x1b[>q\x1b[c"  # every terminal answers the second one
_ANSWERS = re.compile(rb"\x1bP[^\x1b]*\x1b\\|\x1b\[\?[\d;]*c")
_PATIENCE_S = 1.0
_USUAL_CELL = (10, 20)


# --- what the terminal is sent ---


def placeholders(number: int, columns: int, rows: int) -> list[Strip]:
    """The picture with this number, as text."""
    style = Style(color=Color.from_rgb(number >> 16, number >> 8 & 0xFF, number & 0xFF))
    return [
        Strip([Segment("".join(_PLACEHOLDER + _NUMBERS[row] + _NUMBERS[x] for x in range(columns)), style)], columns)
        for row in range(rows)
    ]


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


class Answer(NamedTuple):
    """What a terminal is, in its own words, and what was typed meanwhile."""

    name: str = ""
    typed: str = ""

    @property
    def has_placeholders(self) -> bool:
        """Whether it is known to show them."""
        found = re.match(r"(\w+)[ (](\d+)\.(\d+)", self.name)
        if found is None or found[1].lower() not in _VERSIONS:
            return False
        return (int(found[2]), int(found[3])) >= _VERSIONS[found[1].lower()]


def ask(environment: Mapping[str, str]) -> Answer:
    """Asks the terminal, or tmux about it, for what it is; nothing where none is known to answer. Takes a moment, and
    belongs before anything else reads the keyboard."""
    if "TMUX" in environment:
        return Answer(_outside_of_tmux(environment))
    term = environment.get("TERM", "")
    is_named = "KITTY_WINDOW_ID" in environment or environment.get("TERM_PROGRAM") == "ghostty"
    if term in ("xterm-kitty", "xterm-ghostty") or (is_named and term.startswith("xterm")):
        return _asked()
    return Answer()


def _outside_of_tmux(environment: Mapping[str, str]) -> str:
    """The terminal in which tmux runs, if both let pictures and their colours through."""
    asked = "#{allow-passthrough} #{client_termfeatures} #{client_termtype}"
    command = ["tmux", "display-message", "-p", "-t", environment.get("TMUX_PANE", ""), asked]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    passes, features, name = (*ended.stdout.strip().split(" ", 2), "", "", "")[:3]
    return name if passes not in ("", "0", "off") and "RGB" in features.split(",") else ""


def _asked() -> Answer:
    if sys.platform == "win32" or sys.__stdin__ is None or sys.__stdout__ is None:
        return Answer()
    import termios
    import tty

    heard = b""
    try:
        keyboard, screen = sys.__stdin__.fileno(), sys.__stdout__.fileno()
        before = termios.tcgetattr(keyboard)
        tty.setcbreak(keyboard, termios.TCSANOW)
        try:
            os.write(screen, _WHO_ARE_YOU)
            until_s = time.monotonic() + _PATIENCE_S
            while not any(answer.endswith(b"c") for answer in _ANSWERS.findall(heard)):
                if not select.select([keyboard], [], [], max(0.0, until_s - time.monotonic()))[0]:
                    break
                piece = os.read(keyboard, 4096)
                if not piece:
                    break
                heard += piece
        finally:
            termios.tcsetattr(keyboard, termios.TCSANOW, before)
    except (OSError, ValueError, termios.error):
        return Answer()
    names = [answer for answer in _ANSWERS.findall(heard) if answer.startswith(b"\x1bP>|")]
    typed = _ANSWERS.sub(b"", heard).decode(errors="replace")
    return Answer(names[0][4:-2].decode(errors="replace") if names else "", typed)
