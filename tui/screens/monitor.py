"""The monitor: what the daemon does right now, for every client and not only for this one.

Shows the snapshots of the event stream and nothing else. Pausing freezes the display; the connection goes on, and so
do the record behind the graph and a recording to a file.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace
from rich.style import Style
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import DataTable, Input, Static

from localrun.config import DEFAULT_PORT
from localrun.snapshot import EngineRow, RequestRow, Snapshot
from localrun.tui.daemon import Recorder
from localrun.tui.keys import bind
from localrun.tui.preferences import rich_style
from localrun.tui.screens.details import RequestScreen, UsageScreen, cancel
from localrun.tui.screens.dialog import FilteredScreen
from localrun.tui.session import Session
from localrun.tui.short_text import line
from localrun.tui.widgets.kv_map import KvMap
from localrun.tui.widgets.tables import SORTS, BatchTable, EngineTable, RequestTable
from localrun.tui.widgets.top_bar import Banner, KeyLine, TopBar
from localrun.tui.widgets.vitals import RateGraph, RequestDetail, Throughput, Vitals

_OWN = "this chat"  # what this program itself asks for


class MonitorScreen(FilteredScreen):
    AUTO_FOCUS = "RequestTable"

    # textual declares these as instance variables
    VERTICAL_BREAKPOINTS = [(0, "-least"), (13, "-short"), (20, "-medium"), (32, "-tall")]  # noqa: RUF012
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (130, "-wide")]  # noqa: RUF012

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("monitor.cancel", "cancel"),
        bind("monitor.sort", "sort"),
        bind("monitor.filter", "filter"),
        bind("monitor.view", "view"),
        bind("monitor.pause", "pause"),
        bind("monitor.record", "record"),
        bind("monitor.usage", "usage", show=False),
        Binding("escape", "clear_filter", "No filter", show=False),
        Binding("question_mark", "app.help", "Help", show=False),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__("part of a state, client, route, model, node or lane")
        self._session = session
        self._throughput = Throughput()
        self._vitals = Vitals()
        self._graph = RateGraph(session.rates)
        self._map = KvMap()
        self._requests = self._narrowed = RequestTable(cursor=True)
        self._nothing = Static(id="nothing")
        self._detail = RequestDetail()
        self._batches = BatchTable(cursor=False)
        self._engines = EngineTable(cursor=False)
        self._shown: Snapshot | None = None
        self._sort = next(iter(SORTS))
        self._paused = False

    def compose(self) -> ComposeResult:
        yield TopBar("monitor", self._session)
        yield Banner(self._session)
        with Horizontal(id="aggregate"):
            with Vertical(id="numbers"):
                yield self._throughput
                yield self._vitals
            yield self._graph
            yield self._map
        yield self._nothing
        yield self._requests
        yield self._filter
        yield self._detail
        yield self._batches
        yield self._engines
        yield KeyLine()

    def on_mount(self) -> None:
        self._session.snapshots.subscribe(self, self._on_snapshot)
        self._session.connection.subscribe(self, self._on_connection)
        self._session.recording_failed.subscribe(self, self._on_recording_failed)
        self._on_connection(self._session.trouble)
        self._show_settings()

    def on_screen_resume(self) -> None:
        if self._session.snapshot is not None:
            self._on_snapshot(self._session.snapshot)

    async def action_usage(self) -> None:
        await self.app.push_screen(UsageScreen(self._session))

    def _on_connection(self, trouble: str | None) -> None:
        self.set_class(trouble is not None, "-stale")
        self._show_nothing()

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        if not self.is_current or self._paused:
            return
        own = self._session.client_name
        rows = [replace(row, client=_OWN) if row.client == own else row for row in snapshot.requests]
        self._shown = replace(snapshot, requests=rows)
        self._throughput.show(snapshot.aggregate)
        self._vitals.show(snapshot)
        self._graph.show()
        self.set_class(bool(snapshot.batches), "-batches")
        self._batches.show_batches(snapshot.batches, self._colours())
        self._engines.show_engines(snapshot.engines, self._colours())
        self._show_requests()

    def _show_requests(self) -> None:
        requests = self._wanted()
        self._requests.show_requests(requests, self._sort, self._session.request_rates, self._colours())
        self._show_nothing()
        self._show_detail()

    def _wanted(self) -> list[RequestRow]:
        rows = self._shown.requests if self._shown else []
        wanted = self._filter.value.casefold().split()
        return [row for row in rows if all(part in _searched(row) for part in wanted)]

    def _show_nothing(self) -> None:
        """In place of an empty table: why it is empty."""
        has_rows = bool(self._wanted())
        self.set_class(not has_rows, "-no-requests")
        if has_rows and self.focused is None:  # a table that was hidden could not have it
            self.call_after_refresh(self._requests.focus)
        if self._shown is None:
            text = "Waiting for the daemon." if self._session.trouble else "Waiting for the first numbers."
        elif self._shown.requests:
            text = f"No request of {len(self._shown.requests)} matches the filter. Esc removes it."
        else:
            text = f"No requests in the last minute. Whatever uses {self._session.base_url} shows up here."
        if self._nothing.content != text:
            self._nothing.update(Content(text))

    def _colours(self) -> dict[str, Style]:
        names = {"good": "success", "wait": "warning", "bad": "error"}
        return {name: rich_style(self.app, key) for name, key in names.items()} | {"dim": Style(dim=True)}

    def _selected(self) -> RequestRow | None:
        key = self._requests.selected_key
        rows = self._shown.requests if self._shown else []
        return next((row for row in rows if row.id == key), None)

    @on(DataTable.RowHighlighted, "RequestTable")
    def _show_detail(self) -> None:
        row = self._selected()
        self._detail.row = row
        if self._shown is not None:
            self._map.show(_engine_for(row, self._shown.engines), self._shown.requests)

    @on(DataTable.RowSelected, "RequestTable")
    async def _open_detail(self) -> None:
        row = self._selected()
        if row is not None:
            await self.app.push_screen(RequestScreen(self._session, row))

    def _show_settings(self) -> None:
        address = self._session.base_url.partition("//")[2]
        is_usual = address == f"127.0.0.1:{DEFAULT_PORT}"
        settings = [f"by {self._sort}"] if is_usual else [address, f"by {self._sort}"]
        if self._paused:
            settings.insert(0, "PAUSED")  # where a narrow window shows it
        if self._session.recorder is not None:
            settings.insert(0, "● REC")
        self._detail.settings = " · ".join(settings)

    def _on_recording_failed(self, reason: str) -> None:
        self.notify(line(reason), title="The recording ended", severity="error", markup=False)
        self._show_settings()

    def action_cancel(self) -> None:
        row = self._selected()
        if row is None:
            self.notify("There is no request to cancel.", severity="warning")
        else:
            self.run_worker(cancel(self, self._session, row), group="cancel")

    def action_sort(self) -> None:
        names = list(SORTS)
        self._sort = names[(names.index(self._sort) + 1) % len(names)]
        self._show_settings()
        self._show_requests()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._show_settings()
        if not self._paused and self._session.snapshot is not None:
            self._on_snapshot(self._session.snapshot)

    @on(Input.Changed, "#filter")
    def _filter_changed(self) -> None:
        self._show_requests()

    def action_view(self) -> None:
        """In a narrow terminal, graph and map take turns."""
        self.toggle_class("-map")

    def action_record(self) -> None:
        recorder = self._session.recorder
        if recorder is not None:
            self._session.stop_recording()
            self.notify(line(f"Recorded to {recorder.path}; `localrun top --replay` plays it."), markup=False)
        else:
            try:
                self._session.recorder = Recorder(self._session.new_recording())
            except OSError as error:
                self.notify(line(str(error)), title="Cannot record", severity="error", markup=False)
        self._show_settings()


def _searched(row: RequestRow) -> str:
    """What the filter looks at."""
    return " ".join((row.state, row.client, row.api, row.model, row.node, row.lane, row.id)).casefold()


def _engine_for(row: RequestRow | None, engines: list[EngineRow]) -> EngineRow | None:
    """The engine of a request, else the one with the most cells in use."""
    own = [each for each in engines if row is not None and each.model == row.model and row.node in ("", each.node)]
    return max(own or engines, key=lambda engine: engine.kv_cells_used, default=None)
