"""Everything about one request: what the table has no room for. Follows it while it runs.

Shows a row of the snapshots and nothing else; closes with any of the usual keys.
"""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

from localrun.errors import LocalrunError
from localrun.snapshot import RequestRow, Snapshot
from localrun.tui import quantity
from localrun.tui.plain_text import line
from localrun.tui.request_rates import sparkline
from localrun.tui.session import Session

_LABEL_WIDTH = 16
_SPARK_WIDTH = 48


class RequestScreen(ModalScreen[None]):
    """`row` is how the request stood when it was opened."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q", "dismiss", "Close"),
        Binding("x", "cancel", "Cancel request"),
    ]

    def __init__(self, session: Session, row: RequestRow) -> None:
        super().__init__()
        self._session = session
        self._row = row
        self._facts = Static()

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = line(self._row.id)
            box.border_subtitle = "x cancels · Esc closes"
            yield self._facts

    def on_mount(self) -> None:
        self._session.snapshots.subscribe(self, self._on_snapshot)
        self._show()

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        self._row = next((row for row in snapshot.requests if row.id == self._row.id), self._row)
        self._show()

    def on_click(self, event: events.Click) -> None:
        if event.widget is self:
            self.dismiss()

    def _show(self) -> None:
        rates = self._session.request_rates
        lines = [
            Content.assemble(Content.styled(label.ljust(_LABEL_WIDTH), "$foreground 60%"), line(text))
            for label, text in request_facts(self._row)
        ]
        drawn = sparkline(rates.of(self._row.id), _SPARK_WIDTH, max(rates.of(self._row.id), default=0.0))
        if drawn:
            label = Content.styled("last minute".ljust(_LABEL_WIDTH), "$foreground 60%")
            lines.append(Content.assemble(label, Content.styled(drawn, "$primary")))
        self._facts.update(Content("\n").join(lines))

    def action_cancel(self) -> None:
        self.run_worker(cancel(self, self._session, self._row), group="cancel")


async def cancel(screen: Screen[None], session: Session, row: RequestRow) -> None:
    """Cancels a request, and says what came of it."""
    if row.state.is_final:
        screen.notify("This request has ended already.", severity="warning")
        return
    try:
        cancelled = await session.daemon.cancel(row.id)
    except LocalrunError as error:
        screen.notify(line(error.message), title="Not cancelled", severity="error", markup=False)
        return
    if cancelled:
        screen.notify(line(f"Cancelled the request of {row.client}."), markup=False)
    else:
        screen.notify(line(f"The request of {row.client} had already ended."), severity="warning", markup=False)


def request_facts(row: RequestRow) -> list[tuple[str, str]]:
    """Label and text of all that is known, in reading order; what is not known is left out."""
    found: list[tuple[str, str | None]] = [
        ("state", f"{row.state}{f' ({row.finish_reason})' if row.finish_reason else ''}"),
        ("error", row.error),
        ("client", row.client),
        ("route", row.api),
        ("model", row.model),
        ("lane", row.lane),
        ("slot", None if row.slot is None else str(row.slot)),
        ("queue", None if row.queue_position is None else f"place {row.queue_position}"),
        ("expected wait", None if row.predicted_wait_s is None else quantity.age(row.predicted_wait_s)),
        ("prompt", _prompt(row)),
        ("output", f"{quantity.count(row.output_tokens)} tokens" if row.output_tokens else None),
        ("now", _rate(row.tokens_per_s)),
        ("average", _rate(row.tokens_per_s_avg)),
        ("TTFT", None if row.ttft_s is None else quantity.seconds(row.ttft_s)),
        ("between tokens", None if row.itl_p50_s is None else f"{quantity.seconds(row.itl_p50_s)} (median)"),
        ("age", quantity.age(row.age_s)),
    ]
    return [(label, text) for label, text in found if text]


def _prompt(row: RequestRow) -> str | None:
    if row.prompt_tokens is None:
        return None
    text = f"{quantity.count(row.prompt_tokens)} tokens"
    if row.cached_tokens:
        text += f", {quantity.count(row.cached_tokens)} of them cached"
    if row.computed_tokens < row.prompt_tokens:
        text += f", {quantity.count(row.computed_tokens)} done so far"
    return text


def _rate(tokens_per_s: float | None) -> str | None:
    return None if tokens_per_s is None else f"{quantity.rate(tokens_per_s)} tok/s"
