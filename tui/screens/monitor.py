"""The monitor: what the daemon does right now, for every client and not only for this one.

Shows the snapshots of the event stream and nothing else. Pausing freezes the display; the connection goes on, and so
does the record behind the graph.
"""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from localrun.errors import LocalrunError
from localrun.snapshot import RequestRow, Snapshot
from localrun.tui.plain_text import line
from localrun.tui.session import Session
from localrun.tui.widgets.banner import Banner
from localrun.tui.widgets.engine_table import EngineTable
from localrun.tui.widgets.rate_graph import RateGraph
from localrun.tui.widgets.request_detail import RequestDetail
from localrun.tui.widgets.request_table import SORTS, RequestTable
from localrun.tui.widgets.throughput import Throughput
from localrun.tui.widgets.top_bar import TopBar
from localrun.tui.widgets.vitals import Vitals


class MonitorScreen(Screen[None]):
    AUTO_FOCUS = "RequestTable"

    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall")]  # noqa: RUF012 - textual declares it as an instance variable

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "cancel", "Cancel request"),
        Binding("s", "sort", "Sort"),
        Binding("p", "pause", "Pause"),
        Binding("question_mark", "app.help", "Help", show=False),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._bar = TopBar("monitor")
        self._banner = Banner()
        self._throughput = Throughput()
        self._vitals = Vitals()
        self._graph = RateGraph(session.rates)
        self._requests = RequestTable(cursor=True)
        self._nothing = Static(id="nothing")
        self._detail = RequestDetail()
        self._engines = EngineTable(cursor=False)
        self._shown: Snapshot | None = None
        self._sort = next(iter(SORTS))
        self._paused = False

    def compose(self) -> ComposeResult:
        yield self._bar
        yield self._banner
        with Horizontal(id="aggregate"):
            with Vertical(id="numbers"):
                yield self._throughput
                yield self._vitals
            yield self._graph
        yield self._nothing
        yield self._requests
        yield self._detail
        yield self._engines
        yield Footer()

    def on_mount(self) -> None:
        self._session.snapshots.subscribe(self, self._on_snapshot)
        self._session.connection.subscribe(self, self._on_connection)
        self._session.models.subscribe(self, self._on_model)
        self._on_model(self._session.model)
        self._on_connection(self._session.trouble)
        self._show_settings()

    def on_screen_resume(self) -> None:
        if self._session.snapshot is not None:
            self._on_snapshot(self._session.snapshot)

    def _on_model(self, model: str) -> None:
        self._bar.model = model

    def _on_connection(self, trouble: str | None) -> None:
        self._bar.connected = trouble is None
        self._banner.show(trouble, self._session.base_url)
        self.set_class(trouble is not None, "-stale")
        self._show_nothing()

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        if not self.is_current or self._paused:
            return
        self._shown = snapshot
        colours = self._colours()
        self._throughput.show(snapshot.aggregate)
        self._vitals.snapshot = snapshot
        self._graph.refresh()
        self._requests.show_requests(snapshot.requests, self._sort, colours)
        self._engines.show_engines(snapshot.engines, colours)
        self._show_nothing()
        self._show_detail()

    def _show_nothing(self) -> None:
        """In place of an empty table: why it is empty."""
        has_rows = self._shown is not None and bool(self._shown.requests)
        self.set_class(not has_rows, "-no-requests")
        if self._shown is None:
            text = "Waiting for the daemon." if self._session.trouble else "Waiting for the first numbers."
        else:
            text = f"No requests in the last minute. Whatever uses {self._session.base_url} shows up here."
        self._nothing.update(Content(text))

    def _colours(self) -> dict[str, Style]:
        names = {"good": "success", "wait": "warning", "bad": "error"}
        variables = self.app.theme_variables
        colours = {name: Style(color=Color.parse(variables[key]).rich_color) for name, key in names.items()}
        return {**colours, "dim": Style(dim=True)}

    def _selected(self) -> RequestRow | None:
        key = self._requests.selected_key
        rows = self._shown.requests if self._shown else []
        return next((row for row in rows if row.id == key), None)

    @on(DataTable.RowHighlighted, "RequestTable")
    def _show_detail(self) -> None:
        self._detail.row = self._selected()

    def _show_settings(self) -> None:
        self._detail.settings = f"by {self._sort}" + (" · PAUSED" if self._paused else "")

    async def action_cancel(self) -> None:
        row = self._selected()
        if row is None:
            self.notify("There is no request to cancel.", severity="warning")
            return
        self.run_worker(self._cancel(row), group="cancel")

    async def _cancel(self, row: RequestRow) -> None:
        try:
            cancelled = await self._session.daemon.cancel(row.id)
        except LocalrunError as error:
            self.notify(line(error.message), title="Not cancelled", severity="error", markup=False)
            return
        if cancelled:
            self.notify(line(f"Cancelled the request of {row.client}."), markup=False)
        else:
            self.notify(line(f"The request of {row.client} had already ended."), severity="warning", markup=False)

    def action_sort(self) -> None:
        names = list(SORTS)
        self._sort = names[(names.index(self._sort) + 1) % len(names)]
        self._show_settings()
        if self._shown is not None:
            self._requests.show_requests(self._shown.requests, self._sort, self._colours())

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._show_settings()
        if not self._paused and self._session.snapshot is not None:
            self._on_snapshot(self._session.snapshot)
