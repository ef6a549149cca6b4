"""The daemon's log, with the engines' lines: followed live, narrowed by level and by words.

Keeps what came while it is open, and goes on where it was after the daemon has been away. Sticks to the end unless one
scrolls up.

Does not: keep lines when the app ends; the daemon's own file does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import UTC, datetime
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Resize
from textual.widgets import Input, RichLog, Static
from textual.worker import Worker

from localrun.snapshot import LogLine
from localrun.tui.daemon import Feed
from localrun.tui.keys import bind
from localrun.tui.preferences import rich_style
from localrun.tui.screens.dialog import FilteredScreen
from localrun.tui.session import Session
from localrun.tui.short_text import block, column, line
from localrun.tui.widgets.top_bar import Banner, KeyLine, TopBar

KEPT_LINES = 5_000
LINES_PER_TURN = 50
_PAUSE_S = 0.005
LEVELS = ("debug", "info", "warning", "error")
_RANKS = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 3}
_COLOURS = {"warning": "warning", "error": "error", "critical": "error"}
_SOURCE_WIDTH = 14


class LogsScreen(FilteredScreen):
    AUTO_FOCUS = "RichLog"

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("logs.level", "level"),
        bind("logs.search", "filter"),
        Binding("escape", "clear_filter", "No search", show=False),
        bind("logs.end", "end"),
        Binding("question_mark", "app.help", "Help", show=False),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__("words that a line must have")
        self._session = session
        self._log = self._narrowed = RichLog(max_lines=KEPT_LINES, min_width=0, wrap=True, auto_scroll=True)
        self._settings = Static(id="settings")
        self._lines: deque[LogLine] = deque(maxlen=KEPT_LINES)
        self._unwritten: deque[LogLine] = deque(maxlen=KEPT_LINES)
        self._writer: Worker[None] | None = None
        self._level = "debug"
        self._width = 0

    def compose(self) -> ComposeResult:
        yield TopBar("logs", self._session)
        yield Banner(self._session)
        yield self._log
        yield self._filter
        yield self._settings
        yield KeyLine()

    def on_mount(self) -> None:
        self._show_settings()
        feed = Feed(
            open=lambda: self._session.daemon.logs(self._lines[-1].number if self._lines else 0),
            take=self._take,
            on_lost=lambda _: None,  # the banner says so already
        )
        self.run_worker(feed.run(), name="logs", group="logs")

    def _take(self, found: LogLine) -> None:
        self._lines.append(found)
        if self._is_wanted(found):
            self._unwritten.append(found)
            self._write_soon()

    def _write_soon(self) -> None:
        """Begins to write what waits, unless that is under way."""
        if self._writer is None or self._writer.is_finished:
            self._writer = self.run_worker(self._write_all(), name="write", group="write")

    async def _write_all(self) -> None:
        """In turns, with pauses for the keys: drawing thousands of lines takes seconds."""
        while self._unwritten:
            for _ in range(min(LINES_PER_TURN, len(self._unwritten))):
                self._write(self._unwritten.popleft())
            await asyncio.sleep(_PAUSE_S)

    def _is_wanted(self, found: LogLine) -> bool:
        if _RANKS.get(found.level, 1) < _RANKS[self._level]:
            return False
        text = f"{found.source} {found.text}".casefold()
        return all(word in text for word in self._filter.value.casefold().split())

    def _write(self, found: LogLine) -> None:
        when = datetime.fromtimestamp(found.time_s, UTC).astimezone().strftime("%H:%M:%S")
        named = line(found.source).removeprefix("localrun.")
        while len(named) > _SOURCE_WIDTH and "." in named:
            named = named.partition(".")[2]
        source = column(named, _SOURCE_WIDTH)
        colour = _COLOURS.get(found.level)
        style = rich_style(self.app, colour) if colour else Style.null()
        text = Text.assemble(
            (f"{when} ", Style(dim=True)), (f"{found.level:<8}", style), (source, Style(dim=True)), " "
        )
        text.append(block(found.text), style)
        self._log.write(text, scroll_end=self._log.is_vertical_scroll_end)

    @on(Resize)
    def _wrap_again(self, event: Resize) -> None:
        if event.size.width != self._width:
            self._width = event.size.width
            self._show_all()

    def _show_all(self) -> None:
        self._log.clear()
        self._unwritten = deque(filter(self._is_wanted, self._lines), maxlen=KEPT_LINES)
        self._write_soon()
        self._show_settings()

    def _show_settings(self) -> None:
        words = f" with “{line(self._filter.value)}”" if self._filter.value.strip() else ""
        self._settings.update(Content(f"level {self._level} and above{words}"))

    def action_level(self) -> None:
        self._level = LEVELS[(LEVELS.index(self._level) + 1) % len(LEVELS)]
        self._show_all()

    @on(Input.Changed, "#filter")
    def _searched(self) -> None:
        self._show_all()

    def action_end(self) -> None:
        self._log.scroll_end(animate=False)
