"""A dim line at the bottom of the terminal, under text that goes on flowing.

While it is open the last row is taken out of the terminal's scrolling region (DECSTBM), so the terminal itself wraps
and scrolls the text above it, whatever characters it is made of. Closing gives the row back. A terminal whose size
changes in between gets its row back at once and no line for the rest of the answer.

Does not: decide whether there is a terminal, or what the line says.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self, TextIO

_SAVE = "\x1b7"
_RESTORE = "\x1b8"
MIN_ROWS = 4


class StatusLine:
    """A context manager. Enter it with the cursor at the start of a row."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._size: os.terminal_size | None = None

    def __enter__(self) -> Self:
        size = self._terminal_size()
        if size.lines >= MIN_ROWS:
            self._size = size
            # The line feed makes room when the cursor is on the last row; setting the region moves the cursor home.
            self._write(f"\n{_SAVE}\x1b[1;{size.lines - 1}r{_RESTORE}\x1b[1A")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._size is not None:
            self._write(f"{_SAVE}\x1b[{self._size.lines};1H\x1b[2K\x1b[r{_RESTORE}")
            self._size = None

    def show(self, text: str) -> None:
        """Replace the line's text; what does not fit is cut off."""
        if self._size is None:
            return
        if self._terminal_size() != self._size:
            self.__exit__(None, None, None)
            return
        row = f"\x1b[{self._size.lines};1H\x1b[2K{dim(text[: self._size.columns - 1])}"
        self._write(f"{_SAVE}{row}{_RESTORE}")

    def _terminal_size(self) -> os.terminal_size:
        try:
            return os.get_terminal_size(self._terminal.fileno())
        except OSError:
            return os.terminal_size((0, 0))

    def _write(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()


def dim(text: str) -> str:
    """The text in the terminal's faint colour."""
    return f"\x1b[2m{text}\x1b[0m"
