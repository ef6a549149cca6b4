"""The box that one types into, the line above it (files) and the line below it (the answer's numbers).

The box grows with the text, sends on Enter, remembers what was sent.

Enter sends; ctrl+j and alt+enter begin a new line, and so does shift+enter where a terminal can tell it from Enter. Up
in an empty box brings back what was sent before, older with each press. While a command is typed, up and down move in
the list of how it may go on, and Tab or Enter completes it. Page up and page down scroll the conversation, not the box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import OptionList, TextArea
from textual.widgets.option_list import Option

from localrun.attachments import Kind, dropped
from localrun.tui import short_text
from localrun.tui.answer_progress import StatusPart, fit_parts
from localrun.tui.media import AttachedFile
from localrun.tui.short_text import column, fit, line
from localrun.tui.slash import Completion


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
    class ArrowPressed(Message):
        """Up (-1) or down (1) was pressed where there is nothing to move in or to bring back."""

        step: int

    @dataclass
    class FilesDropped(Message):
        """Nothing but the paths of these pictures and sounds was pasted, which is what a terminal makes of files that
        are dropped on it. The box does not hold `text`."""

        text: str
        paths: tuple[Path, ...]

    class BackspacePressed(Message):
        """Backspace was pressed where there is nothing to delete."""

    class FocusMessages(Message):
        """The focus is wanted for the messages: Tab was pressed in the empty box, or Shift+Tab."""

    def __init__(self, completions: Completions) -> None:
        super().__init__(show_line_numbers=False, tab_behavior="focus", compact=True, highlight_cursor_line=False)
        self._completions = completions
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
        self.text = text
        self.move_cursor(self.document.end)

    async def _on_key(self, event: events.Key) -> None:
        if self._does(event.key):
            event.stop()
            event.prevent_default()
        else:
            await super()._on_key(event)

    def _does(self, key: str) -> bool:
        """False for a key that does what it does in every text box."""
        if self._complete(key):
            return True
        if key == "enter":
            self.post_message(self.Submitted(self.text.strip()))
        elif key in ("shift+enter", "alt+enter", "ctrl+j"):
            self.insert("\n")
        elif key == "backspace" and not self.text:
            self.post_message(self.BackspacePressed())
        elif key in ("tab", "shift+tab"):
            if key == "shift+tab" or not self.text:
                self.post_message(self.FocusMessages())
        else:
            return key in ("up", "down") and self._browse(-1 if key == "up" else 1)
        return True

    async def _on_paste(self, event: events.Paste) -> None:
        paths = dropped(event.text)
        if not paths:
            return  # the base class's own handler follows
        event.stop()
        event.prevent_default()
        self.post_message(self.FilesDropped(event.text, paths))

    @property
    def _is_recalled(self) -> bool:
        """Whether it holds what was sent before, unchanged."""
        return self._recalled is not None and self.text == self._sent[self._recalled]

    def _complete(self, key: str) -> bool:
        """False when the key has nothing to do with the list of completions."""
        if not self._completions.is_for(self.text) or self._is_recalled:
            return False
        if key in ("up", "down"):
            self._completions.move(-1 if key == "up" else 1)
            return True
        completed = self._completions.completed(first=key == "tab") if key in ("tab", "enter") else None
        if completed is not None:
            self.put(completed)
        return completed is not None

    def _browse(self, step: int) -> bool:
        """Moves through what was sent. False when the key should move the cursor instead."""
        if not self.text:
            if step < 0 and self._sent:
                self._recall(len(self._sent) - 1)
            else:
                self.post_message(self.ArrowPressed(step))
            return True
        if not self._is_recalled or self._recalled is None:
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
        self.put(self._sent[index])


_MAX_FILE_LINES = 3
_NAME_WIDTH = 30


class Attachments(Widget):
    """The files that go with the next question. Takes no room while there are none. A click on the cross of a file
    removes it."""

    files: reactive[tuple[AttachedFile, ...]] = reactive((), layout=True)

    def add(self, *files: AttachedFile) -> None:
        self.files = (*self.files, *files)

    def take(self) -> tuple[AttachedFile, ...]:
        """The files, which are no longer here."""
        files, self.files = self.files, ()
        return files

    def watch_files(self) -> None:
        self.display = bool(self.files)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._file_lines(width))

    def render(self) -> Content:
        return Content("\n").join(self._file_lines(self.size.width))

    def action_detach(self, index: int) -> None:
        """The file with this number does not go with the question."""
        self.files = self.files[:index] + self.files[index + 1 :]

    def _file_lines(self, width: int) -> list[Content]:
        """As many files in a line as fit, and how many more there are where the lines do not suffice."""
        lines: list[Content] = []
        for index, attached in enumerate(self.files):
            chip = _chip(attached, index, width)
            if lines and lines[-1].cell_length + 1 + chip.cell_length <= width:
                lines[-1] = Content.assemble(lines[-1], " ", chip)
            elif len(lines) < _MAX_FILE_LINES:
                lines.append(chip)
            else:
                n_more = len(self.files) - index
                lines[-1] = Content.assemble(lines[-1].truncate(width - 10), f" +{n_more} more")
                break
        return lines


def _chip(attached: AttachedFile, index: int, width: int) -> Content:
    file, medium = attached
    size = short_text.size(len(file.data))
    mark = "≡" if medium is None else "♪" if medium.kind is Kind.SOUND else "▣"
    return Content.from_markup(
        "[$foreground on $panel] [$primary]$mark[/] $name [$foreground 60%]$size[/] "
        f"[@click=detach({index})]✕[/] [/]",
        mark=mark, name=fit(file.name, min(_NAME_WIDTH, max(8, width - 16))), size=size,
    )  # fmt: skip


_MARK = "● "
_WIDE_GAP, _NARROW_GAP = 3, 2
_TONES = {"good": "$success", "bad": "bold $error", "wait": "$warning", "rate": "bold $primary", "": "$foreground 75%"}


class StatusLine(Widget):
    """The state of the current answer and its numbers, as many as fit. The first is the state and has a dot before
    it."""

    parts: reactive[tuple[StatusPart, ...]] = reactive(())

    def render(self) -> Content:
        room = self.size.width - len(_MARK)
        gap = _WIDE_GAP
        parts = fit_parts(list(self.parts), room, gap)
        if len(parts) < len(self.parts):
            gap = _NARROW_GAP
            parts = fit_parts(list(self.parts), room, gap)
        texts = [Content.styled(part.text, _TONES[part.tone]) for part in parts]
        if texts:
            texts[0] = Content.styled(_MARK, _TONES[parts[0].tone]) + texts[0]
        return Content(" " * gap).join(texts)


_SHOWN_WIDTH = 26


class Completions(OptionList, can_focus=False):
    """Takes no room while it is empty."""

    def __init__(self) -> None:
        super().__init__()
        self._for = ""
        self._found: list[Completion] = []

    def show(self, text: str, found: Sequence[Completion]) -> None:
        """How `text` may go on. The first is marked, unless nothing was typed of it yet: Enter then means the text."""
        self._for, self._found = text, list(found)
        self.clear_options()
        self.add_options([Option(self._row(each)) for each in found])
        self.display = bool(found)
        self.highlighted = None if not found or (text.endswith((" ", "/")) and len(text) > 1) else 0

    def _row(self, completion: Completion) -> Content:
        shown = line(completion.shown)
        half = self.app.size.width // 2
        width = min(_SHOWN_WIDTH, half) if completion.what else max(_SHOWN_WIDTH, half)
        return Content.assemble(
            Content.styled(column(fit(shown, width), width), "bold $primary"),
            " ",
            Content.styled(fit(line(completion.what), max(8, self.app.size.width - width - 6)), "$foreground 70%"),
        )

    def is_for(self, text: str) -> bool:
        """Whether it says how this text may go on: it comes a moment after the text."""
        return bool(self._found) and self._for == text

    def move(self, step: int) -> None:
        """Marks the next (1) or the previous (-1), round and round."""
        if step > 0:
            self.action_cursor_down()
        else:
            self.action_cursor_up()

    def completed(self, *, first: bool = False) -> str | None:
        """The text with what is marked, or with the first where nothing is; None where that changes nothing."""
        index = 0 if self.highlighted is None and first else self.highlighted
        if index is None:
            return None
        text = self._found[index].text
        return None if text.strip() == self._for.strip() and not (first and text != self._for) else text
