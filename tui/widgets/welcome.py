"""What an empty conversation shows: one sentence, and questions to begin with.

The marked question is sent by Enter in the empty prompt, so the first answer is one key away.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Static

from localrun.tui.plain_text import fit

_TINY = "tiny"

_SUGGESTIONS = {
    _TINY: ("Tell me a story about a fox.", "What is 3 + 4?", "What is localrun?"),
    "": (
        "What can you help me with?",
        "Explain what a KV cache is, in two sentences.",
        "Write a haiku about patience.",
    ),
}


class Suggestion(Static):
    """One question. `marked` shows that Enter would send it."""

    marked: reactive[bool] = reactive(False)

    @dataclass
    class Chosen(Message):
        text: str

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def render(self) -> Content:
        style = "bold $primary" if self.marked else "$foreground 80%"
        return Content.styled(("› " if self.marked else "  ") + self.text, style)

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.post_message(self.Chosen(self.text))


class Welcome(Vertical):
    """Stands alone in a conversation until the first question."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self._suggestions = [Suggestion(text) for text in _SUGGESTIONS.get(model, _SUGGESTIONS[""])]
        self._suggestions[0].marked = True

    def compose(self) -> ComposeResult:
        if self._model == _TINY:
            text = "This is tiny, the small model that comes with localrun. It runs on this machine alone."
        else:
            text = f"This is {fit(self._model, 60)}. It runs on this machine alone."
        yield Static(Content(text), classes="greeting")
        yield Static(Content("Type below, or press Enter to ask:"), classes="hint")
        yield from self._suggestions

    @property
    def marked(self) -> str:
        """The question that Enter sends."""
        return next(suggestion.text for suggestion in self._suggestions if suggestion.marked)

    def move(self, step: int) -> None:
        """Marks the next (1) or previous (-1) question, round and round."""
        index = next(i for i, suggestion in enumerate(self._suggestions) if suggestion.marked)
        self._suggestions[index].marked = False
        self._suggestions[(index + step) % len(self._suggestions)].marked = True
