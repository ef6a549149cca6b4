"""The list above the prompt of how a command may go on. The prompt keeps the focus, and moves in it."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from localrun.tui.completion import Completion
from localrun.tui.short_text import column, fit, line

_SHOWN_WIDTH = 26


class Completions(OptionList, can_focus=False):
    """Takes no room while it is empty."""

    def __init__(self) -> None:
        super().__init__()
        self._for = ""
        self._found: list[Completion] = []

    def show(self, text: str, found: Sequence[Completion]) -> None:
        """How `text` may go on. The first is marked, unless nothing was typed of it yet: Enter then means the text."""
        self._for, self._found = text, list(found)
        self.clear_options()
        self.add_options([Option(self._row(each)) for each in found])
        self.display = bool(found)
        self.highlighted = None if not found or (text.endswith((" ", "/")) and len(text) > 1) else 0

    def _row(self, completion: Completion) -> Content:
        shown = line(completion.shown)
        half = self.app.size.width // 2
        width = min(_SHOWN_WIDTH, half) if completion.what else max(_SHOWN_WIDTH, half)
        return Content.assemble(
            Content.styled(column(fit(shown, width), width), "bold $primary"),
            " ",
            Content.styled(fit(line(completion.what), max(8, self.app.size.width - width - 6)), "$foreground 70%"),
        )

    def is_for(self, text: str) -> bool:
        """Whether it says how this text may go on: it comes a moment after the text."""
        return bool(self._found) and self._for == text

    def move(self, step: int) -> None:
        """Marks the next (1) or the previous (-1), round and round."""
        if step > 0:
            self.action_cursor_down()
        else:
            self.action_cursor_up()

    def completed(self, *, first: bool = False) -> str | None:
        """The text with what is marked, or with the first where nothing is; None where that changes nothing."""
        index = 0 if self.highlighted is None and first else self.highlighted
        if index is None:
            return None
        text = self._found[index].text
        return None if text.strip() == self._for.strip() and not (first and text != self._for) else text
