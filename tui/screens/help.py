"""The keys and the commands."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from localrun.tui.slash import COMMANDS

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
            ("Esc", "stop the answer; from a message, back to the prompt"),
            ("ctrl+n", "new chat; a running answer goes on"),
            ("ctrl+l", "earlier chats: open, search, rename, delete"),
            ("F5  F6", "a second chat beside this one; go to the other"),
            ("ctrl+e", "write the prompt in $EDITOR"),
            ("ctrl+y", "copy the last answer"),
            ("PgUp  PgDn", "scroll"),
            ("Tab", "go to the messages, then:"),
            ("  e  r", "edit the question, ask it again"),
            ("  [  ]", "the question's earlier and later versions"),
            ("  y  c  t", "copy the answer, copy its code, show its thinking"),
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

_KEY_WIDTH = 13
_COMMAND_WIDTH = 22


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
    lines.append(Content.styled("Commands, typed in the prompt", "bold $primary"))
    for name, (arguments, what) in COMMANDS.items():
        usage = f"/{name} {arguments}".strip()
        lines.append(Content.assemble(Content.styled(usage.ljust(_COMMAND_WIDTH), "bold"), " ", what))
    lines.append(Content(""))
    lines.append(Content.styled("Chats are kept on this machine alone, until they are deleted.", "$foreground 70%"))
    return Content("\n").join(lines)
