"""The model picker: what the daemon has, narrowed by typing, chosen by Enter.

A path to a GGUF file is a model name too, so typing one offers it as it stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localrun.errors import LocalrunError
from localrun.tui import quantity
from localrun.tui.plain_text import fit, line
from localrun.tui.session import Session

_NAME_WIDTH = 28


class ModelsScreen(ModalScreen[str]):
    """Dismissed with the chosen name, or with None."""

    AUTO_FOCUS = "Input"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f3,ctrl+o", "dismiss", "Close"),
        Binding("down", "move(1)", "Next", show=False),
        Binding("up", "move(-1)", "Previous", show=False),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._rows: list[dict[str, Any]] = []
        self._input = Input(placeholder="Type to narrow, or a path to a .gguf file")
        self._list = OptionList()
        self._note = Static(id="note")

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Models"
            box.border_subtitle = "Enter chooses · Esc closes"
            yield self._input
            yield self._list
            yield self._note

    def on_mount(self) -> None:
        self._list.can_focus = False
        self._say("Asking the daemon…")
        self.run_worker(self._load(), exclusive=True)

    async def _load(self) -> None:
        try:
            self._rows = await self._session.daemon.models()
        except LocalrunError as error:
            self._say(line(error.message))
            return
        self._narrow(self._input.value)

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._narrow(event.value)

    def _narrow(self, text: str) -> None:
        wanted = text.strip().lower()
        options = [self._option(row) for row in self._rows if wanted in _name(row).lower()]
        path = _path(text)
        if path is not None:
            options.append(Option(Content.assemble(Content.styled("file ", "$accent"), line(str(path))), id=str(path)))
        self._list.set_options(options)
        chosen = [index for index, option in enumerate(options) if option.id == self._session.model]
        if options:
            self._list.highlighted = chosen[0] if chosen else 0
        self._say("" if options else "No model has this in its name.")

    def _option(self, row: dict[str, Any]) -> Option:
        name = _name(row)
        details = row.get("details") or {}
        engine = self._session.engine_of(name)
        facts = (
            f"{quantity.size(row.get('size')):>9}  "
            f"{fit(str(details.get('parameter_size') or ''), 6):>6}  "
            f"{fit(str(details.get('quantization_level') or ''), 7):<7}"
        )
        mark = ("›" if name == self._session.model else " ", "$primary bold")
        loaded = Content.styled("  loaded" if engine else "", "$success")
        return Option(
            Content.assemble(
                mark, " ", fit(name, _NAME_WIDTH).ljust(_NAME_WIDTH), Content.styled(facts, "$foreground 65%"), loaded
            ),
            id=name,
        )

    def _say(self, text: str) -> None:
        self._note.update(Content(text))
        self._note.display = bool(text)

    def action_move(self, step: int) -> None:
        if step > 0:
            self._list.action_cursor_down()
        else:
            self._list.action_cursor_up()

    @on(Input.Submitted)
    def _choose_marked(self) -> None:
        option = self._list.highlighted_option
        if option is not None and option.id is not None:
            self.dismiss(option.id)

    @on(OptionList.OptionSelected)
    def _choose(self, event: OptionList.OptionSelected) -> None:
        if event.option_id is not None:
            self.dismiss(event.option_id)


def _name(row: dict[str, Any]) -> str:
    return str(row.get("name") or row.get("model") or "").removesuffix(":latest")


def _path(text: str) -> Path | None:
    """An absolute path, since the daemon's folder is not this one's; None when the text does not look like a path."""
    text = text.strip()
    if not text or not ("/" in text or text.endswith(".gguf")):
        return None
    return Path(text).expanduser().absolute()
