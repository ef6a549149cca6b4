"""The keys, and what this version does not do."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

_SECTIONS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Everywhere",
        (
            ("F1  F2", "chat, monitor"),
            ("F3  ctrl+o", "choose the model"),
            ("ctrl+r", "reconnect now, when the daemon is away"),
            ("ctrl+p", "all commands, themes among them"),
            ("ctrl+q", "quit"),
        ),
    ),
    (
        "Chat",
        (
            ("Enter", "send; in an empty prompt, the marked question"),
            ("ctrl+j", "new line; shift+enter too, in some terminals"),
            ("up  down", "what was sent before, in an empty prompt"),
            ("Esc", "stop the answer"),
            ("ctrl+n", "new chat"),
            ("ctrl+y", "copy the last answer"),
            ("PgUp  PgDn", "scroll"),
        ),
    ),
    (
        "Monitor",
        (
            ("up  down", "select a request"),
            ("Enter", "all about it"),
            ("x", "cancel it, whoever sent it"),
            ("s", "sort by arrival, speed, output, prompt, client"),
            ("/", "filter by parts of state, client, route, model, lane"),
            ("v", "KV map or graph, where there is no room for both"),
            ("p", "pause the display"),
            ("r", "record to a file, or end the recording"),
        ),
    ),
)

_HISTORY = (
    "Each model has its own conversation. Conversations live in memory and end with this program; "
    "this version saves no history."
)

_KEY_WIDTH = 13


class HelpScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f10,question_mark,q,enter", "dismiss", "Close"),
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "Keys"
            box.border_subtitle = "Esc closes"
            yield Static(_text())


def _text() -> Content:
    lines: list[Content] = []
    for title, keys in _SECTIONS:
        lines.append(Content.styled(title, "bold $primary"))
        lines += [Content.assemble(Content.styled(key.ljust(_KEY_WIDTH), "bold"), what) for key, what in keys]
        lines.append(Content(""))
    lines.append(Content.styled(_HISTORY, "$foreground 70%"))
    return Content("\n").join(lines)
