"""What was used, by API key, day or model, as `/localrun/v1/usage` says; a key that is no admin's sees its own.

Asks when it is opened and whenever another view is chosen. Does not: follow what is used meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
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
from localrun.tui.short_text import column, count, line

_BY = ("key", "day", "model")
_DAYS = (30, 365, 1, 7)
_NUMBERS = {"requests": "requests", "prompt": "prompt_tokens", "cached": "cached_tokens", "output": "output_tokens"}
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
        self._text.update(_table(report, is_narrow=self.app.size.width < 100))


def _table(report: UsageReport, *, is_narrow: bool) -> Content:
    """In a narrow window without the cached tokens, and with round numbers."""
    if not report.rows:
        return Content(_NOTHING)
    name_width, number_width, widest = (8, 8, 99_999) if is_narrow else (26, 14, 10**12)
    fields = {name: field for name, field in _NUMBERS.items() if not (is_narrow and name == "cached")}

    def shown(name: str, numbers: Iterable[str]) -> str:
        return column(line(name) or "(no model)", name_width) + "".join(
            column(number, number_width, right=True) for number in numbers
        )

    sums = {field: sum(getattr(row, field) for row in report.rows) for field in _NUMBERS.values()}
    rows = [
        shown(row.name, (count(getattr(row, field), widest=widest) for field in fields.values()))
        for row in (*report.rows, UsageRow(name="together", **sums))
    ]
    head = Content.styled(shown(report.by, fields), "$foreground 60%")
    return Content("\n").join([head, *map(Content, rows[:-1]), Content.styled(rows[-1], "bold")])
