"""Foreign text made fit for one line or block of a terminal.

Client names, model names, error messages and the model's own words come from elsewhere. A control character among them
(an escape sequence above all) would reach the terminal as a command, so it is shown as a mark instead. Pure.
"""

from __future__ import annotations

import re

from rich.cells import cell_len, set_cell_size

_MARK = "\N{REPLACEMENT CHARACTER}"

# C0 and C1 controls, and the characters that reorder what is displayed around them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_LINE_ENDS = re.compile(r"\r\n?")


def block(text: str) -> str:
    """Text of several lines: line feeds and tabs stay, other control characters become a mark."""
    return _CONTROLS.sub(_MARK, _LINE_ENDS.sub("\n", text))


def line(text: str) -> str:
    """Text as a single line: every run of white space is one space."""
    return _CONTROLS.sub(_MARK, " ".join(text.split()))


def fit(text: str, width: int) -> str:
    """One line, cut with an ellipsis when wider than `width` cells (a Chinese character or an emoji takes two)."""
    text = line(text)
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


def column(text: str, width: int, *, right: bool = False) -> str:
    """One line of exactly `width` cells: cut or filled up with spaces."""
    text = fit(text, width)
    space = " " * (width - cell_len(text))
    return space + text if right else text + space
