"""The box that one types into: grows with the text, sends on Enter, remembers what was sent.

Enter sends; shift+enter and ctrl+j (which every terminal can tell from Enter) begin a new line. Up in an empty box
brings back what was sent before, older with each press. Page up and page down scroll the conversation, not the box.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea


class Prompt(TextArea):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "screen.scroll_conversation(-1)", "Scroll up", show=False),
        Binding("pagedown", "screen.scroll_conversation(1)", "Scroll down", show=False),
    ]

    @dataclass
    class Submitted(Message):
        """Enter was pressed. The box still holds the text; whoever takes it calls `take`."""

        text: str

    @dataclass
    class Browsed(Message):
        """Up (-1) or down (1) was pressed where there is nothing to move in or to bring back."""

        step: int

    def __init__(self) -> None:
        super().__init__(show_line_numbers=False, tab_behavior="focus", compact=True, highlight_cursor_line=False)
        self._sent: list[str] = []
        self._recalled: int | None = None

    def take(self) -> None:
        """The text was accepted: remember it and empty the box."""
        text = self.text.strip()
        if text and (not self._sent or self._sent[-1] != text):
            self._sent.append(text)
        self._recalled = None
        self.text = ""

    def put(self, text: str) -> None:
        """Replaces what stands in the box."""
        self._set(text)

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self.post_message(self.Submitted(self.text.strip()))
        elif event.key in ("shift+enter", "ctrl+j"):
            event.stop()
            event.prevent_default()
            self.insert("\n")
        elif event.key in ("up", "down") and self._browse(-1 if event.key == "up" else 1):
            event.stop()
            event.prevent_default()
        else:
            await super()._on_key(event)

    def _browse(self, step: int) -> bool:
        """Moves through what was sent. False when the key should move the cursor instead."""
        in_recall = self._recalled is not None and self.text == self._sent[self._recalled]
        if not self.text:
            if step < 0 and self._sent:
                self._recall(len(self._sent) - 1)
            else:
                self.post_message(self.Browsed(step))
            return True
        if not in_recall or self._recalled is None:
            return False
        target = self._recalled + step
        if target >= len(self._sent):
            self._recalled = None
            self.text = ""
        else:
            self._recall(max(0, target))
        return True

    def _recall(self, index: int) -> None:
        self._recalled = index
        self._set(self._sent[index])

    def _set(self, text: str) -> None:
        self.text = text
        self.move_cursor(self.document.end)
