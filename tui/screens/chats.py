"""The chats that were had: opened, searched in, renamed, deleted, brought back.

Without a word typed it lists them, the latest first; with words it lists what was said with these in it, in any chat.

Does not: open a chat; it is dismissed with the number of the one that was chosen.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from localrun.tui import short_text
from localrun.tui.history import Chat
from localrun.tui.keys import bind
from localrun.tui.screens.dialog import Picker
from localrun.tui.session import Session
from localrun.tui.short_text import column, fit, line

# In a wide terminal; a narrow one leaves the title what the other columns, 42 cells with the frame, do not take.
_TITLE_WIDTH = 46
_LEAST_TITLE_WIDTH = 12
_OTHERS_WIDTH = 42
_MODEL_WIDTH = 16


class ChatsScreen(Picker[int]):
    """Dismissed with a chat's number, or with None. `words` are searched for at first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+l", "dismiss", "Close"),
        bind("chats.rename", "rename", priority=True),
        # The Delete key stays the box's: it deletes letters.
        bind("chats.delete", "delete", priority=True),
        bind("chats.restore", "restore", priority=True),
    ]

    def __init__(self, session: Session, words: str = "") -> None:
        super().__init__(Input(words, placeholder="Words to search for in all chats"))
        self._session = session
        self._renaming: Chat | None = None

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Chats"
            rename, delete, restore = (self._session.key(f"chats.{what}") for what in ("rename", "delete", "restore"))
            hints = ("Enter opens", f"{rename} renames", f"{delete} deletes", f"{restore} undoes", "Esc closes")
            self.hint(box, *hints)
            yield self._input
            yield self._list
            yield self._note

    def on_mount(self) -> None:
        self._show()

    def on_resize(self) -> None:
        if self._renaming is None:
            self._show()

    def _row(self, chat: Chat) -> Content:
        """On one line, in a narrow window without the model."""
        room = self.app.size.width * 96 // 100 - _OTHERS_WIDTH
        model = column(short_text.model(chat.model, _MODEL_WIDTH), _MODEL_WIDTH) + " "
        if room < _LEAST_TITLE_WIDTH:
            room, model = room + len(model), ""
        return Content.assemble(
            column(chat.title, max(_LEAST_TITLE_WIDTH, min(_TITLE_WIDTH, room))),
            " ",
            Content.styled(model, "$foreground 65%"),
            Content.styled(short_text.when(chat.changed_at_s), "$foreground 50%"),
        )

    def _show(self) -> None:
        words = self._input.value.strip()
        try:
            options = self._found(words) if words else self._all()
        except sqlite3.Error as error:
            self._note.update(Content(f"The history cannot be read: {error}"))
            return
        self._list.clear_options()
        self._list.add_options(options)
        if options:
            self._list.highlighted = 0
        nothing = "No chat has these words in it." if words else "There are no chats yet."
        self._note.update(Content("" if options else nothing))

    def _all(self) -> list[Option]:
        return [Option(self._row(chat), id=str(chat.id)) for chat in self._session.history.chats()]

    def _found(self, words: str) -> list[Option]:
        found = []
        for hit in self._session.history.search(words):
            text = Content(fit(hit.chat.title, _TITLE_WIDTH))
            if hit.excerpt:
                said = {"user": "you", "tool": "tool"}.get(hit.role, "model")
                text += Content.assemble("\n  ", Content.styled(f"{said}: {line(hit.excerpt)}", "$foreground 65%"))
            found.append(Option(text, id=f"{hit.chat.id} {hit.message_id}"))
        return found

    def _selected(self) -> Chat | None:
        option = self._list.highlighted_option
        if option is None or option.id is None:
            return None
        try:
            return self._session.history.chat(int(option.id.split()[0]))
        except (KeyError, sqlite3.Error):
            return None

    @on(Input.Changed)
    def _narrow(self) -> None:
        self._doomed = None
        if self._renaming is None:
            self._show()

    @on(Input.Submitted)
    def _choose(self) -> None:
        if self._renaming is not None:
            renamed, self._renaming = self._renaming, None
            title, self._input.value = self._input.value, ""
            problem = (
                self._problem_of(lambda: self._session.history.rename(renamed.id, title)) if title.strip() else None
            )
            self._show()
            if problem is not None:
                self._note.update(Content(problem))
            return
        chat = self._selected()
        self.dismiss(None if chat is None else chat.id)

    @on(OptionList.OptionSelected)
    def _clicked(self) -> None:
        self._choose()

    def action_rename(self) -> None:
        chat = self._selected()
        if chat is not None:
            self._renaming = chat
            self._input.value = chat.title
            self._note.update(Content("Enter gives the chat this name."))

    def action_delete(self) -> None:
        """Asks first: the second press deletes."""
        chat = self._selected()
        if chat is None:
            return
        title = fit(chat.title, _TITLE_WIDTH)
        if not self._is_asked_again(chat):
            self._note.update(Content(f"{self._session.key('chats.delete')} again deletes “{title}”."))
            return
        undo = self._session.deleted_chats
        problem = self._problem_of(lambda: undo.append(self._session.history.delete(chat.id)))
        if problem is None:
            self._session.deleted.publish(chat.id)
        self._show()
        key = self._session.key("chats.restore")
        self._note.update(Content(problem or f"Deleted “{title}”. {key} brings it back until you quit."))

    def action_restore(self) -> None:
        """Brings back the chat that was deleted last, also one that was deleted before the list was closed."""
        undo = self._session.deleted_chats
        if not undo:
            self._note.update(Content("No chat was deleted since localrun was started."))
            return
        problem = self._problem_of(lambda: self._session.history.restore(undo[-1]))
        if problem is None:
            undo.pop()
        self._show()
        if problem is not None:
            self._note.update(Content(problem))

    @staticmethod
    def _problem_of(change: Callable[[], object]) -> str | None:
        """Changes the history; what went wrong, None when nothing did."""
        try:
            change()
        except KeyError:
            return "This chat was deleted in another window."
        except sqlite3.Error as error:
            return line(f"The history cannot be changed: {error}")
        return None
