"""The keys, the commands, and the words of the monitor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localrun.tui.keys import of_section
from localrun.tui.screens.dialog import Dialog
from localrun.tui.slash import COMMANDS

# Section of the table of keys, its title, and keys besides that cannot be changed.
_SECTIONS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("app", "Everywhere", (("^\\", "all commands, themes among them"),)),
    (
        "chat",
        "Chat",
        (
            ("Enter", "send; in an empty prompt, the marked question"),
            ("^j", "new line; alt+enter and often shift+enter too"),
            ("Tab", "complete a command; up and down move in the list"),
            ("up down", "what was sent before, in an empty prompt"),
            ("Backspace", "in an empty prompt: take the last attached file away"),
            ("PgUp PgDn", "scroll"),
        ),
    ),
    (
        "message",
        "A message",
        (
            ("Tab", "from an empty prompt to the newest message; then to later ones"),
            ("shift+Tab", "to the newest message, then to earlier ones"),
            ("letters", "go to the prompt, as always"),
        ),
    ),
    ("chats", "List of chats", ()),
    ("models", "List of models", ()),
    ("tools", "List of tools", ()),
    ("monitor", "Monitor", (("Enter", "all about the selected request"),)),
    ("usage", "Use", ()),
    ("logs", "Logs", ()),
)

# As in the table of localrun/docs/README.md.
WORDS = {
    "prefill": "computing the prompt",
    "decode": "computing the answer, token by token",
    "TTFT": "time to first token",
    "ITL": "inter-token latency",
    "slot": "room for one running request; the others wait",
    "KV cell": "the memory of one token of context",
    "prefix": "the beginning that prompts share; computed once, then cached",
    "step": "one pass through the model, for all running requests",
    "target": "how long a step may take",
    "draft": "tokens guessed ahead, and the share that was right",
    "lane": "a request's priority: interactive, default or batch",
    "engine": "the process that has one model loaded",
}

_NOTE = "Chats are kept on this machine alone, until they are deleted. Keys can be changed in tui.toml."
_KEY_WIDTH = 13
_COMMAND_WIDTH = 22


class HelpScreen(Dialog[None]):
    """`keymap` are the person's own keys by name. Keys and commands stand beside each other where there is room."""

    # textual declares it as an instance variable
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (150, "-wide")]  # noqa: RUF012

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+g,f10,question_mark,q,enter", "dismiss", "Close")]

    def __init__(self, keymap: Mapping[str, str]) -> None:
        super().__init__()
        self._keymap = keymap

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "Keys"
            box.border_subtitle = "Esc closes"
            keys = [
                _block(title, [*of_section(section, self._keymap), *others], _KEY_WIDTH)
                for section, title, others in _SECTIONS
            ]
            yield Static(Content("\n").join(keys))
            words = _block("Words of the monitor", WORDS.items(), _KEY_WIDTH)
            usages = ((f"/{name} {arguments}".strip(), f" {what}") for name, (arguments, what) in COMMANDS.items())
            commands = _block("Commands, typed in the prompt", usages, _COMMAND_WIDTH)
            yield Static(Content("\n").join([words, commands, Content.styled(_NOTE, "$foreground 70%")]))


def _block(title: str, rows: Iterable[tuple[str, str]], width: int) -> Content:
    """A title, what is explained and what it is, and an empty line."""
    lines = [Content.assemble(Content.styled(name.ljust(width), "bold"), what) for name, what in rows]
    return Content("\n").join([Content.styled(title, "bold $primary"), *lines, Content("")])
