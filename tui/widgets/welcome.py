"""What an empty conversation shows: which model answers, and questions to begin with.

Enter in the empty prompt asks the marked one, so the first answer is one key away.
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

from localrun.last_model import BUILT_IN
from localrun.tui.short_text import fit

_SUGGESTIONS = {
    BUILT_IN: ("Tell me a story about a fox.", "What is 3 + 4?", "What is localrun?"),
    "": (
        "What can you help me with?",
        "Explain what a KV cache is, in two sentences.",
        "Write a haiku about patience.",
    ),
}


class Suggestion(Static):
    """A question that can be marked. `marked` shows that Enter would ask it."""

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
    """Stands alone in a conversation until the first question. `machine` is the name of another one that answers,
    `models_key` the key that lists the models."""

    def __init__(self, model: str, machine: str, models_key: str) -> None:
        super().__init__()
        place = f"on {machine}" if machine else "on this machine alone"
        if model == BUILT_IN:
            who, another = "tiny, the small model that comes with localrun", "finds better ones"
        else:
            who, another = fit(model, 60), "chooses another"
        self._greeting = f"This is {who}. It runs {place}. {models_key} {another}."
        self._suggestions = [Suggestion(text) for text in _SUGGESTIONS.get(model, _SUGGESTIONS[""])]
        self._suggestions[0].marked = True

    def compose(self) -> ComposeResult:
        yield Static(Content(self._greeting), classes="greeting")
        yield Static(Content("Type below, or press Enter to ask:"), classes="hint")
        yield from self._suggestions

    @property
    def marked(self) -> Suggestion:
        """What Enter asks."""
        return next(suggestion for suggestion in self._suggestions if suggestion.marked)

    def move(self, step: int) -> None:
        """Marks the next (1) or previous (-1) question, round and round."""
        index = (self._suggestions.index(self.marked) + step) % len(self._suggestions)
        for at, suggestion in enumerate(self._suggestions):
            suggestion.marked = at == index
