"""What was used, by API key, day or model, as `/localrun/v1/usage` says; a key that is no admin's sees its own.

Asks when it is opened and whenever another view is chosen. Does not: follow what is used meanwhile.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localrun.errors import LocalrunError
from localrun.snapshot import UsageReport, UsageRow
from localrun.tui.keys import bind
from localrun.tui.screens.dialog import Dialog
from localrun.tui.session import Session
from localrun.tui.short_text import column, line

_BY = ("key", "day", "model")
_DAYS = (30, 365, 1, 7)
_NAME_WIDTH = 26
_NUMBER_WIDTH = 14
_NUMBERS = ("requests", "prompt", "cached", "output")
_NOTHING = "Nothing was counted."


class UsageScreen(Dialog[None]):
    """The numbers are tokens but for the requests'; those of prompts include cached ones."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q,u", "dismiss", "Close"),
        bind("usage.by", "by"),
        bind("usage.days", "days"),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._by, self._days = _BY[0], _DAYS[0]
        self._text = Static("Asking the daemon…")

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            by, days = (self._session.key(f"usage.{what}") for what in ("by", "days"))
            self.hint(box, f"{by} key, day or model", f"{days} days", "Esc closes")
            yield self._text

    def on_mount(self) -> None:
        self._ask()

    def action_by(self) -> None:
        self._by = _BY[(_BY.index(self._by) + 1) % len(_BY)]
        self._ask()

    def action_days(self) -> None:
        self._days = _DAYS[(_DAYS.index(self._days) + 1) % len(_DAYS)]
        self._ask()

    def _ask(self) -> None:
        self.run_worker(self._load(), name="usage", group="usage", exclusive=True)

    async def _load(self) -> None:
        try:
            report = await self._session.daemon.usage(self._by, self._days)
        except LocalrunError as error:
            self._text.update(Content(line(error.message)))
            return
        self.query_one(VerticalScroll).border_title = Content(f"Use by {report.by}, since {report.since}")
        self._text.update(_table(report))


def _table(report: UsageReport) -> Content:
    if not report.rows:
        return Content(_NOTHING)
    head = column(report.by, _NAME_WIDTH) + "".join(column(name, _NUMBER_WIDTH, right=True) for name in _NUMBERS)
    total = UsageRow(
        name="together",
        requests=sum(row.requests for row in report.rows),
        prompt_tokens=sum(row.prompt_tokens for row in report.rows),
        cached_tokens=sum(row.cached_tokens for row in report.rows),
        output_tokens=sum(row.output_tokens for row in report.rows),
    )
    rows = [_row(row) for row in report.rows]
    return Content("\n").join(
        [Content.styled(head, "$foreground 60%"), *map(Content, rows), Content.styled(_row(total), "bold")]
    )


def _row(row: UsageRow) -> str:
    numbers = (row.requests, row.prompt_tokens, row.cached_tokens, row.output_tokens)
    name = column(line(row.name) or "(no model)", _NAME_WIDTH)
    return name + "".join(column(f"{number:,}", _NUMBER_WIDTH, right=True) for number in numbers)
