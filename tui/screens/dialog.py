"""What dialogs have in common: the keys that work everywhere; and a list narrowed by typing, where the keys go to
the box, up and down to the list. And what screens have in common that are narrowed by a box.

Does not: know what is listed, or what Enter does with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, TypeVar

from rich.cells import cell_len
from rich.console import RenderableType
from rich.segment import Segment
from rich.style import Style
from textual import on
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.content import Content
from textual.renderables.background_screen import BackgroundScreen
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Input, OptionList, Static

from localrun.tui.keys import bind
from localrun.tui.pictures import has_placeholders

Chosen = TypeVar("Chosen")

# What a border leaves of a line that stands in it: the corners, and a dash and a blank at each end.
_FRAME_WIDTH = 6


class _DimmedScreen(BackgroundScreen):
    """The screen behind a dialog, dimmed but for pictures of kitty's protocol: their colour says which they are."""

    @classmethod
    def process_segments(cls, segments: Iterable[Segment], color: Color) -> Iterable[Segment]:
        for segment in segments:
            for dimmed in super().process_segments((segment,), color):
                if segment.style is not None and dimmed.style is not None and has_placeholders(segment.text):
                    yield Segment(dimmed.text, dimmed.style + Style(color=segment.style.color))
                else:
                    yield dimmed


class Dialog(ModalScreen[Chosen]):
    """A modal screen hides the app's own keys, so they are bound here again; a dialog's own keys win over them."""

    _hinted: tuple[Widget, tuple[str, ...]] | None = None

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("app.chat", "app.leave('chat')", show=False),
        bind("app.monitor", "app.leave('monitor')", show=False),
        bind("app.logs", "app.leave('logs')", show=False),
        bind("app.help", "app.help", show=False),
        bind("app.reconnect", "app.reconnect", show=False),
    ]

    def hint(self, box: Widget, *hints: str) -> None:
        """Says at the bottom of the dialog's box what keys do: of these as many as fit, and the last one always."""
        self._hinted = (box, hints)

    def on_resize(self) -> None:
        self.call_after_refresh(self._fit_hints)

    def _fit_hints(self) -> None:
        if self._hinted is None:
            return
        box, (*hints, last) = self._hinted
        while cell_len(" · ".join((*hints, last))) > box.outer_size.width - _FRAME_WIDTH and hints:
            hints.pop()
        box.border_subtitle = Content(" · ".join((*hints, last)))

    def render(self) -> RenderableType:
        rendered = super().render()
        return _DimmedScreen(rendered.screen, rendered.color) if isinstance(rendered, BackgroundScreen) else rendered


class FilteredScreen(Screen[None]):
    """What it lists is narrowed by what is typed into its box, which is there while it has the focus or anything in it.
    Subclasses compose `_filter`, and say what it narrows (`_narrowed`, which gets the focus back)."""

    def __init__(self, placeholder: str) -> None:
        super().__init__()
        self._filter = Input(placeholder=placeholder, id="filter", compact=True)
        self._narrowed: Widget

    def action_filter(self) -> None:
        self.add_class("-filtering")
        self._filter.focus()

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        self._narrowed.focus()
        self.set_class(bool(self._filter.value), "-filtering")

    def action_clear_filter(self) -> None:
        self._filter.value = ""
        self.remove_class("-filtering")
        self._narrowed.focus()


class Picker(Dialog[Chosen]):
    """`box` is typed into. Subclasses compose it with `_list`, and `_note` for a sentence below."""

    AUTO_FOCUS = "Input"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "move(1)", "Next", show=False),
        Binding("up", "move(-1)", "Previous", show=False),
    ]

    def __init__(self, box: Input) -> None:
        super().__init__()
        self._input = box
        self._list = OptionList()
        self._list.can_focus = False
        self._note = Static(id="note")
        self._doomed: object = None

    def _is_asked_again(self, doomed: object) -> bool:
        """Deleting asks first: whether this was to be deleted just now already. Moving and typing take that back."""
        was_asked = self._doomed == doomed
        self._doomed = None if was_asked else doomed
        return was_asked

    def action_move(self, step: int) -> None:
        self._doomed = None
        if step > 0:
            self._list.action_cursor_down()
        else:
            self._list.action_cursor_up()
