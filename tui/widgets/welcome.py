"""What an empty conversation shows: one sentence, and what to begin with: questions, and models to chat with.

Enter in the empty prompt takes what is marked: it asks the question, or goes to the model. So the first answer is one
key away, and where there is a better model than the built-in one, two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Static

from localrun.errors import LocalrunError
from localrun.tui import short_text
from localrun.tui.daemon import Daemon
from localrun.tui.short_text import column, fit

MAX_OFFERS = 4
# Files that are looked into, at most, to find so many.
MAX_LOOKS = 12


async def chat_models(daemon: Daemon) -> list[tuple[str, str]]:
    """Names and sizes of those that were made to chat, the latest first. The built-in model is not among them.

    A model that brings no chat template was trained to continue texts, not to answer. Raises DaemonUnreachable.
    """
    rows = [row for row in await daemon.models() if _may_chat(row)]
    rows.sort(key=lambda row: str(row.get("modified_at", "")), reverse=True)
    found: list[tuple[str, str]] = []
    for row in rows[:MAX_LOOKS]:
        try:
            shown = await daemon.show(row["name"])
        except LocalrunError:
            continue  # it went away, or its file is damaged
        if shown.get("template"):
            found.append((row["name"], short_text.size(row.get("size"))))
        if len(found) == MAX_OFFERS:
            break
    return found


def _may_chat(row: dict[str, Any]) -> bool:
    return "completion" in row.get("capabilities", ()) and row.get("source") != "built-in"


BUILT_IN = "tiny"
_NAME_WIDTH = 44

_SUGGESTIONS = {
    BUILT_IN: ("Tell me a story about a fox.", "What is 3 + 4?", "What is localrun?"),
    "": (
        "What can you help me with?",
        "Explain what a KV cache is, in two sentences.",
        "Write a haiku about patience.",
    ),
}


class Choice(Static):
    """One line that can be marked. `marked` shows that Enter would take it."""

    marked: reactive[bool] = reactive(False)

    @dataclass
    class Chosen(Message):
        choice: Choice

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label

    def render(self) -> Content:
        style = "bold $primary" if self.marked else "$foreground 80%"
        return Content.styled(("› " if self.marked else "  ") + self._label, style)

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.post_message(self.Chosen(self))


class Suggestion(Choice):
    """A question."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class Offer(Choice):
    """A model to chat with, and a few words about it."""

    def __init__(self, model: str, about: str) -> None:
        super().__init__(f"{column(fit(model, _NAME_WIDTH), _NAME_WIDTH)} {about}")
        self.model = model


class Welcome(Vertical):
    """Stands alone in a conversation until the first question. `machine` is the name of another one that answers."""

    def __init__(self, model: str, machine: str = "") -> None:
        super().__init__()
        self._model = model
        self._place = f"on {machine}" if machine else "on this machine alone"
        self._machine = machine or "this machine"
        self._hint = Static(Content("Type below, or press Enter to ask:"), classes="hint")
        self._choices: list[Choice] = [Suggestion(text) for text in _SUGGESTIONS.get(model, _SUGGESTIONS[""])]
        self._choices[0].marked = True
        self._was_moved = False

    def compose(self) -> ComposeResult:
        if self._model == BUILT_IN:
            text = f"This is tiny, the small model that comes with localrun. It runs {self._place}."
        else:
            text = f"This is {fit(self._model, 60)}. It runs {self._place}."
        yield Static(Content(text), classes="greeting")
        yield self._hint
        yield from self._choices

    @property
    def marked(self) -> Choice:
        """What Enter takes."""
        return next(choice for choice in self._choices if choice.marked)

    def move(self, step: int) -> None:
        """Marks the next (1) or previous (-1) choice, round and round."""
        self._was_moved = True
        index = self._choices.index(self.marked)
        self._mark((index + step) % len(self._choices))

    async def offer(self, models: Sequence[tuple[str, str]]) -> None:
        """Also offer to chat with these models (name, a few words), above the questions. The first is marked, unless
        the mark was moved already."""
        offers = [Offer(model, about) for model, about in models]
        hint = Static(
            Content(f"There are other models on {self._machine}. Enter chats with the marked one:"), classes="hint"
        )
        await self.mount(hint, *offers, Static(""), before=self._hint)
        self._hint.update(Content("Or type below and ask tiny:"))
        self._choices = [*offers, *self._choices]
        if not self._was_moved:
            self._mark(0)

    def _mark(self, index: int) -> None:
        for at, choice in enumerate(self._choices):
            choice.marked = at == index
