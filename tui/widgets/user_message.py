"""What the person said, as it was typed. Can be focused, for what can be done with a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.binding import BindingType
from textual.content import Content
from textual.message import Message as Event
from textual.widgets import Static

from localrun.tui.history import Message
from localrun.tui.keys import bind
from localrun.tui.plain_text import block


class UserMessage(Static, can_focus=True):
    """Verbatim: no Markdown, no markup. `message` is None until it belongs to the chat. Of several versions the caption
    says which one this is."""

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("message.edit", "want('edit')"),
        bind("message.retry", "want('retry')"),
        bind("message.previous", "want('previous')"),
        bind("message.next", "want('next')"),
    ]

    @dataclass
    class Wanted(Event):
        """A person wants this done with the question: edit, retry, previous or next (version)."""

        message: Message | None
        what: str

    def __init__(self, text: str, message: Message | None = None, version: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.text = text
        self.message = message
        self._version = version

    def belong(self, message: Message, version: tuple[int, int]) -> None:
        """It is part of the chat from now on."""
        self.message, self._version = message, version
        self.refresh(layout=True)

    def render(self) -> Content:
        text = Content(block(self.text))
        number, n_versions = self._version
        if n_versions < 2:
            return text
        return Content.assemble(text, "\n", Content.styled(f"version {number} of {n_versions}", "$foreground 50%"))

    def action_want(self, what: str) -> None:
        self.post_message(self.Wanted(self.message, what))
