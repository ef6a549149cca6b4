"""What the person said, as it was typed."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from localrun.tui.plain_text import block


class UserMessage(Static):
    """Verbatim: no Markdown, no markup."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(block(text)))
