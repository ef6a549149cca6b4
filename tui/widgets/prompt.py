"""The box that one types into, the line above it (files, commands) and the line below it (the answer's numbers).

The box grows with the text, sends on Enter, remembers what was sent.

Enter sends; shift+enter and ctrl+j (which every terminal can tell from Enter) begin a new line. Up in an empty box
brings back what was sent before, older with each press. Page up and page down scroll the conversation, not the box.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import TextArea

from localrun.tui import short_text, slash
from localrun.tui.answer_progress import Fact, fit_facts
from localrun.tui.files import Attachment
from localrun.tui.short_text import fit, line


class Prompt(TextArea):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "screen.scroll_conversation(-1)", "Scroll up", show=False),
        Binding("pagedown", "screen.scroll_conversation(1)", "Scroll down", show=False),
    ]

    @dataclass
    class Submitted(Message):
        """Enter was pressed. The box still holds the text; whoever takes it calls `take`."""

        text: str

    @dataclass
    class Browsed(Message):
        """Up (-1) or down (1) was pressed where there is nothing to move in or to bring back."""

        step: int

    def __init__(self) -> None:
        super().__init__(show_line_numbers=False, tab_behavior="focus", compact=True, highlight_cursor_line=False)
        self._sent: list[str] = []
        self._recalled: int | None = None

    def take(self) -> None:
        """The text was accepted: remember it and empty the box."""
        text = self.text.strip()
        if text and (not self._sent or self._sent[-1] != text):
            self._sent.append(text)
        self._recalled = None
        self.text = ""

    def put(self, text: str) -> None:
        """Replaces what stands in the box."""
        self._set(text)

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self.post_message(self.Submitted(self.text.strip()))
        elif event.key in ("shift+enter", "ctrl+j"):
            event.stop()
            event.prevent_default()
            self.insert("\n")
        elif event.key in ("up", "down") and self._browse(-1 if event.key == "up" else 1):
            event.stop()
            event.prevent_default()
        else:
            await super()._on_key(event)

    def _browse(self, step: int) -> bool:
        """Moves through what was sent. False when the key should move the cursor instead."""
        in_recall = self._recalled is not None and self.text == self._sent[self._recalled]
        if not self.text:
            if step < 0 and self._sent:
                self._recall(len(self._sent) - 1)
            else:
                self.post_message(self.Browsed(step))
            return True
        if not in_recall or self._recalled is None:
            return False
        target = self._recalled + step
        if target >= len(self._sent):
            self._recalled = None
            self.text = ""
        else:
            self._recall(max(0, target))
        return True

    def _recall(self, index: int) -> None:
        self._recalled = index
        self._set(self._sent[index])

    def _set(self, text: str) -> None:
        self.text = text
        self.move_cursor(self.document.end)


_MAX_COMMANDS = 6


class Attachments(Widget):
    """The files that go with the next question, or the commands that fit what is typed. Takes no room while there is
    nothing to show."""

    commands: reactive[list[str]] = reactive([], layout=True)
    files: reactive[tuple[Attachment, ...]] = reactive((), layout=True)

    def add(self, file: Attachment) -> None:
        self.files = (*self.files, file)

    def take(self) -> tuple[Attachment, ...]:
        """The files, which are no longer here."""
        files, self.files = self.files, ()
        return files

    def watch_commands(self) -> None:
        self._show()

    def watch_files(self) -> None:
        self._show()

    def _show(self) -> None:
        self.display = bool(self.commands or self.files)
        self.styles.height = min(_MAX_COMMANDS, max(1, len(self.commands)))

    def render(self) -> Content:
        if self.commands:
            return Content("\n").join([_command(name, self.size.width) for name in self.commands[:_MAX_COMMANDS]])
        names = ", ".join(f"{file.name} ({short_text.size(file.size_bytes)})" for file in self.files)
        return Content.assemble(
            Content.styled("with ", "$foreground 60%"), fit(line(names), max(8, self.size.width - 5))
        )


def _command(name: str, width: int) -> Content:
    arguments, what = slash.COMMANDS[name]
    usage = f"/{name} {arguments}".ljust(26)
    return Content.assemble(
        Content.styled(usage, "bold $primary"), Content.styled(fit(what, width - 27), "$foreground 70%")
    )


_MARK = "● "
_WIDE_GAP, _NARROW_GAP = 3, 2
_TONES = {"good": "$success", "bad": "bold $error", "wait": "$warning", "rate": "bold $primary", "": "$foreground 75%"}


class StatusLine(Widget):
    """The state of the current answer and its numbers, as many as fit. The first is the state and has a dot before
    it."""

    facts: reactive[tuple[Fact, ...]] = reactive(())

    def render(self) -> Content:
        room = self.size.width - len(_MARK)
        gap = _WIDE_GAP
        facts = fit_facts(list(self.facts), room, gap)
        if len(facts) < len(self.facts):
            gap = _NARROW_GAP
            facts = fit_facts(list(self.facts), room, gap)
        parts = [Content.styled(fact.text, _TONES[fact.tone]) for fact in facts]
        if parts:
            parts[0] = Content.styled(_MARK, _TONES[facts[0].tone]) + parts[0]
        return Content(" " * gap).join(parts)
