"""Words of an answer wrapped for a terminal while they come.

A terminal wraps by itself, in the middle of words, and one that was left with its cursor behind the last column forgets
that when a status line is drawn elsewhere: the next letter then lands on the last one. So the last column stays empty.
"""

from __future__ import annotations

import re
import sys

from rich.cells import cell_len

# Of scripts without blanks: lines may break at each of these.
_ALONE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60"
_PIECE = re.compile(rf"\n|[ \t]+|[{_ALONE}]|[^ \t\n{_ALONE}]+")
_TAB = 8


class Wrapping:
    """`feed` takes pieces of a text and gives back what can be written of it so far; `end` gives the rest. Nothing but
    blanks at the end of a line is replaced, by a line break. A word that is longer than a line is cut."""

    def __init__(self) -> None:
        self._column = 0
        self._blanks = ""
        self._word = ""

    def feed(self, text: str, n_columns: int) -> str:
        """`n_columns` are the terminal's, of which the last one stays empty; 0 if nobody knows."""
        width = _width(n_columns)
        written: list[str] = []
        for found in _PIECE.finditer(self._word + text):
            piece = found[0]
            if piece == "\n":
                self._column, self._blanks = 0, ""
                written.append("\n")
            elif piece[0] in " \t":
                self._blanks += piece
            elif found.end() == len(found.string) and len(piece) < width and cell_len(piece[0]) == 1:
                self._word = piece  # it may go on
                return "".join(written)
            else:
                written += self._put(piece, width)
        self._word = ""
        return "".join(written)

    def end(self, n_columns: int) -> str:
        """What was held back."""
        word, self._word = self._word, ""
        return "".join(self._put(word, _width(n_columns))) if word else ""

    def _put(self, word: str, width: int) -> list[str]:
        blanks, self._blanks = self._blanks.replace("\t", " " * (_TAB - self._column % _TAB)), ""
        written = [blanks]
        if self._column and self._column + len(blanks) + cell_len(word) > width:
            written, self._column, blanks = ["\n"], 0, ""
        self._column += len(blanks)
        for character in word:
            n_cells = cell_len(character)
            if self._column + n_cells > width:
                written.append("\n")
                self._column = 0
            written.append(character)
            self._column += n_cells
        return written


def _width(n_columns: int) -> int:
    return n_columns - 1 if n_columns > 2 else sys.maxsize
