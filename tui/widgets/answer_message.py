"""The model's answer: Markdown that grows while it is being read, and a caption with its numbers at the end.

Pieces are collected and written at most `WRITES_PER_S` times a second, however fast they come: parsing costs more than
a token takes. This replaces textual's MarkdownStream, whose `stop` raises when a stream ends before its task has begun.
The end is rendered once more from the whole text, since a block that was parsed in halves may differ.
"""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.timer import Timer
from textual.widgets import Markdown, Static

from localrun.tui.plain_text import block, line

WRITES_PER_S = 20


class AnswerMessage(Vertical):
    """Mounted empty. `append` from the reading task, then `finish` once."""

    def __init__(self) -> None:
        super().__init__()
        self._markdown = Markdown(open_links=False)
        self._caption = Static(classes="caption")
        self._pending: list[str] = []
        self._timer: Timer | None = None

    def compose(self) -> ComposeResult:
        yield self._markdown
        yield self._caption

    def on_mount(self) -> None:
        self._timer = self.set_interval(1 / WRITES_PER_S, self._write)

    def append(self, text: str) -> None:
        """Shows more text at the next write."""
        self._pending.append(text)

    async def _write(self) -> None:
        if not self._pending:
            return
        text = "".join(self._pending)
        self._pending.clear()
        await self._markdown.append(block(text))

    async def finish(self, full_text: str, caption: str) -> None:
        """Shows the text and the caption for good. A write that is under way comes before it: Markdown keeps order."""
        if self._timer is not None:
            self._timer.stop()
        self._pending.clear()
        await self._markdown.update(block(full_text))
        self.show_caption(caption)

    def show_caption(self, caption: str) -> None:
        """Replaces the line below the answer; an empty one takes no room."""
        self._caption.update(caption)
        self._caption.display = bool(caption)

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """A model may write any link. Only web pages are opened; for others the address is shown."""
        event.stop()
        if event.href.startswith(("http://", "https://")):
            self.app.open_url(event.href)
        else:
            self.notify(line(event.href), title="Not a web address", severity="warning", markup=False)
