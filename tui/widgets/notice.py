"""A remark of the TUI itself inside the conversation: something failed, and what to do."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from localrun.tui.plain_text import block


class Notice(Static):
    """`title` says what happened in a few words, `text` why."""

    def __init__(self, title: str, text: str) -> None:
        super().__init__(Content.assemble(Content.styled(title, "bold $error"), "\n", Content(block(text))))
