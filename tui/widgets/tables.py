"""The tables of requests, batches and engines, whose rows come and go and whose cells change several times a second.

Rows are known by key. `show` compares with what is on the screen: it updates the cells that differ, adds and removes
rows, and reorders only when the order differs, keeping the cursor on its row. Nothing is cleared, except when the width
of the terminal asks for another set of columns.

To the library a row is one wide cell: it renders every visible cell anew whenever any of them changes, and that many
small ones took four fifths of the monitor's time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text
from textual import events
from textual.widgets import DataTable

from localrun.snapshot import BatchRow, EngineRow, RequestRow, RequestState
from localrun.tui import short_text
from localrun.tui.answer_progress import prefill_percent
from localrun.tui.rates import RequestRates, sparkline
from localrun.tui.short_text import column as aligned
from localrun.tui.widgets.vitals import bar


@dataclass(frozen=True)
class Column:
    """`width` and the `gap` after it are in cells. `grows` is its share of the space left over. `from_width` is the
    terminal width from which the column is shown. Once a row has a node, those that are `is_for_nodes` are there as
    well, and others from the width `beside_nodes`. `cut` makes texts fit where their ends count more than their
    beginnings."""

    key: str
    label: str
    width: int
    right: bool = True
    grows: int = 0
    from_width: int = 0
    gap: int = 2
    beside_nodes: int = 0
    is_for_nodes: bool = False
    cut: Callable[[str, int], str] | None = None


@dataclass(frozen=True)
class TableRow:
    """`texts` by column key; a missing one is blank. `styles` by column key, "" for the whole row."""

    key: str
    texts: Mapping[str, str]
    styles: Mapping[str, Style]


class KeyedText(Text):
    """A cell that knows its row, which is how a sort by an outside order finds it."""

    row_key: str = ""


_INDENT = " "
_CELL = "row"


class LiveTable(DataTable[KeyedText]):
    """Does not know what a row means."""

    COLUMNS: ClassVar[tuple[Column, ...]] = ()

    def __init__(self, *, cursor: bool) -> None:
        super().__init__(
            cursor_type="row" if cursor else "none", cursor_foreground_priority="renderable", cell_padding=0
        )
        self._shown_columns: list[Column] = []
        self._has_nodes = False
        self._rows: dict[str, TableRow] = {}
        self._order: list[str] = []

    @property
    def selected_key(self) -> str | None:
        return self._order[self.cursor_row] if 0 <= self.cursor_row < len(self._order) else None

    def on_resize(self, event: events.Resize) -> None:
        self._fit_columns(event.size.width)

    def show(self, rows: Sequence[TableRow]) -> None:
        if not self._has_nodes and any(row.texts.get("node") for row in rows):
            self._has_nodes = True
            if self._shown_columns:
                self._fit_columns(self.size.width)
        if not self._shown_columns:
            self._rows = {row.key: row for row in rows}
            self._order = [row.key for row in rows]
            return
        selected = self.selected_key
        wanted = {row.key: row for row in rows}
        for key in [key for key in self._rows if key not in wanted]:
            self.remove_row(key)
            del self._rows[key]
        for key, row in wanted.items():
            before = self._rows.get(key)
            if before is None:
                self.add_row(self._cell(row), key=key)
            elif before.styles != row.styles or any(
                before.texts.get(column.key) != row.texts.get(column.key) for column in self._shown_columns
            ):
                self.update_cell(key, _CELL, self._cell(row))
        self._order = [key for key in self._order if key in wanted]
        self._order += [key for key in wanted if key not in self._rows]
        self._rows = wanted
        self._reorder([row.key for row in rows], selected)

    def _reorder(self, order: list[str], selected: str | None) -> None:
        if order != self._order:
            rank = {key: index for index, key in enumerate(order)}
            self.sort(_CELL, key=lambda cell: rank[cell.row_key])
            self._order = order
        if selected in self._rows and selected != self.selected_key:
            self.move_cursor(row=order.index(selected), animate=False)

    def _cell(self, row: TableRow) -> KeyedText:
        cell = KeyedText(style=row.styles.get("", Style.null()), no_wrap=True, end="")
        cell.row_key = row.key
        for column in self._shown_columns:
            cell.append(self._aligned(row.texts.get(column.key, ""), column), row.styles.get(column.key))
            cell.append(" " * column.gap)
        return cell

    def _aligned(self, text: str, column: Column) -> str:
        if column.cut is not None:
            text = column.cut(text, column.width)
        text = aligned(text, column.width, right=column.right)
        return _INDENT + text if column is self._shown_columns[0] else text

    def _fit_columns(self, width: int) -> None:
        """Chooses the columns for a width and spreads what is left over the ones that grow."""
        columns = [column for column in self.COLUMNS if self._is_shown(column, width)]
        spare = width - len(_INDENT) - sum(column.width + column.gap for column in columns)
        shares = sum(column.grows for column in columns)
        if spare > 0 and shares:
            columns = [replace(column, width=column.width + spare * column.grows // shares) for column in columns]
        if columns == self._shown_columns:
            return
        rows, selected = [self._rows[key] for key in self._order], self.selected_key
        self.clear(columns=True)
        self._shown_columns = columns
        labels = [self._aligned(column.label, column) + " " * column.gap for column in columns]
        self.add_column(Text("".join(labels), no_wrap=True), width=max(width, sum(map(len, labels))), key=_CELL)
        self._rows, self._order = {}, []
        self.show(rows)
        if selected in self._rows:
            self.move_cursor(row=self._order.index(selected), animate=False)

    def _is_shown(self, column: Column, width: int) -> bool:
        if not self._has_nodes:
            return width >= column.from_width and not column.is_for_nodes
        return width >= max(column.from_width, column.beside_nodes)


class EngineTable(LiveTable):
    """One row for each engine process."""

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("model", "engine", 11, right=False, grows=1, cut=short_text.model),
        Column("node", "node", 9, right=False, grows=1, is_for_nodes=True),
        Column("pid", "pid", 7, from_width=52, beside_nodes=113),
        Column("state", "state", 8, right=False, from_width=46, beside_nodes=60),
        Column("slots", "slots", 5),
        Column("queued", "queue", 5, from_width=100),
        Column("kv", "KV cells", 11),
        Column("rate", "tok/s", 5, is_for_nodes=True, from_width=63),
        Column("step", "step", 6, beside_nodes=71),
        Column("target", "target", 6, from_width=100),
        Column("rss", "in RAM", 8, beside_nodes=80),
        Column("expires", "expires", 7, gap=1, beside_nodes=104),
    )

    def show_engines(self, engines: Sequence[EngineRow], colours: Mapping[str, Style]) -> None:
        """`colours` are styles by the names good, wait and bad."""
        self.show([_engine_row(engine, colours) for engine in engines])


def _engine_row(engine: EngineRow, colours: Mapping[str, Style]) -> TableRow:
    ready = engine.state == "ready" and not engine.is_preparing
    texts = {
        "model": engine.model,
        "node": engine.node,
        "rate": _text(short_text.rate(engine.tokens_per_s or None)),
        "pid": "" if engine.pid is None else str(engine.pid),
        "state": "prepares" if engine.is_preparing else engine.state,
        "slots": f"{engine.slots_busy}/{engine.slots}" if engine.slots else "",
        "queued": str(engine.queued),
        "kv": f"{short_text.cells(engine.kv_cells_used)}/{short_text.cells(engine.kv_cells)}"
        if engine.kv_cells
        else "",
        "step": "" if engine.step_s is None else short_text.seconds(engine.step_s),
        "target": short_text.seconds(engine.target_itl_s) if engine.target_itl_s else "",
        "rss": "" if engine.rss_bytes is None else short_text.size(engine.rss_bytes),
        "expires": "" if engine.state != "ready" else _text(short_text.age(engine.expires_in_s)) or "never",
    }
    state = colours["good"] if ready else colours["bad"] if engine.state == "failed" else colours["wait"]
    # Two engines never serve the same model, but one that stops and its successor may be seen together.
    return TableRow(f"{engine.model} {engine.replica or engine.pid}", texts, {"state": state})


class BatchTable(LiveTable):
    """One row for each batch that has not ended."""

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("id", "batch", 13, right=False, grows=1),
        Column("state", "state", 11, right=False),
        Column("model", "model", 11, right=False, grows=1, from_width=100, cut=short_text.model),
        Column("bar", "", 8, right=False),
        Column("done", "done", 13),
        Column("failed", "failed", 6),
        Column("rate", "line/s", 6),
        Column("left", "left", 7, gap=1),
        Column("waits", "", 12, right=False, grows=2, from_width=110),
    )

    def show_batches(self, batches: Sequence[BatchRow], colours: Mapping[str, Style]) -> None:
        """`colours` are styles by the names good, wait and bad."""
        self.show([_batch_row(batch, colours) for batch in batches])


def _batch_row(batch: BatchRow, colours: Mapping[str, Style]) -> TableRow:
    n_done = batch.succeeded + batch.errored
    left_s = (batch.lines - n_done) / batch.lines_per_s if batch.lines_per_s else None
    texts = {
        "id": batch.id,
        "state": "waiting" if batch.waits_for else batch.state.replace("_", " "),
        "model": batch.model,
        "bar": "".join(bar(n_done / batch.lines, 8)) if batch.lines else "",
        "done": f"{short_text.cells(n_done)}/{short_text.cells(batch.lines)}",
        "failed": _count(batch.errored or None),
        "rate": _text(short_text.rate(batch.lines_per_s)),
        "left": _text(short_text.age(left_s)),
        "waits": batch.waits_for,
    }
    state = colours["wait" if batch.waits_for or batch.state != "in_progress" else "good"]
    return TableRow(batch.id, texts, {"state": state, "failed": colours["bad"], "waits": colours["wait"]})


TREND_WIDTH = 10

SORTS: dict[str, Callable[[RequestRow], Any]] = {
    "arrival": lambda row: -row.age_s,
    "tok/s": lambda row: -(row.tokens_per_s or 0.0),
    "output": lambda row: -row.output_tokens,
    "prompt": lambda row: -(row.prompt_tokens or 0),
    "client": lambda row: (row.client, -row.age_s),
}
"""Orders of the table, by the name that the screen shows. Ended requests come last in each of them."""


class RequestTable(LiveTable):
    """The requests of the daemon, running ones first."""

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("state", "state", 11, right=False, gap=1),
        Column("client", "client", 9, right=False, grows=2),
        Column("api", "api", 12, right=False, grows=2, from_width=115, beside_nodes=124),
        Column("model", "model", 7, right=False, grows=1, from_width=48, beside_nodes=58, cut=short_text.model),
        Column("node", "node", 7, right=False, grows=1, is_for_nodes=True, from_width=48),
        Column("lane", "lane", 11, right=False, from_width=126, beside_nodes=136),
        Column("slot", "slot", 4, from_width=94),
        Column("prompt", "prompt", 6, from_width=56, beside_nodes=66),
        Column("cached", "cached", 6, from_width=80, beside_nodes=102),
        Column("output", "output", 6),
        Column("drafts", "draft", 5, from_width=100, beside_nodes=110),
        Column("now", "tok/s", 5),
        Column("avg", "avg", 5, from_width=94),
        Column("trend", "lately", 10, right=False, from_width=147, beside_nodes=156),
        Column("ttft", "TTFT", 6, from_width=66, beside_nodes=74),
        Column("itl", "ITL", 6, from_width=135, beside_nodes=144),
        Column("age", "age", 6, gap=1, from_width=74, beside_nodes=80),
    )

    def show_requests(
        self, requests: Sequence[RequestRow], sort: str, rates: RequestRates, colours: Mapping[str, Style]
    ) -> None:
        """`colours` are styles by the names good, wait, bad, rate and dim."""
        order = SORTS[sort]
        rows = sorted(requests, key=lambda row: (row.state.is_final, order(row), row.id))
        top = rates.top()
        self.show([_request_row(row, sparkline(rates.of(row.id), TREND_WIDTH, top), colours) for row in rows])


def _request_row(row: RequestRow, trend: str, colours: Mapping[str, Style]) -> TableRow:
    prefilling = row.state is RequestState.PREFILL
    state = f"prefill {prefill_percent(row)}" if prefilling else str(row.state)
    texts = {
        "state": state,
        "client": row.client,
        "api": row.api.removeprefix("/"),
        "model": row.model,
        "node": row.node,
        "lane": row.lane,
        "slot": "" if row.slot is None else str(row.slot),
        "prompt": _count(row.prompt_tokens),
        "cached": _count(row.cached_tokens),
        "output": _count(row.output_tokens or None),
        "drafts": _text(short_text.percent(row.draft_hit_rate)),
        "now": "" if row.state.is_final else _text(short_text.rate(row.tokens_per_s)),
        "avg": _text(short_text.rate(row.tokens_per_s_avg)),
        "trend": trend,
        "itl": _text(short_text.seconds(row.itl_p50_s)),
        "ttft": _text(short_text.seconds(row.ttft_s)),
        "age": short_text.age(row.age_s),
    }
    if row.state.is_final:
        return TableRow(row.id, texts, {"": colours["dim"], **({"state": colours["bad"]} if row.error else {})})
    colour = colours["good"] if row.state is RequestState.DECODE else colours["wait"]
    return TableRow(row.id, texts, {"state": colour, "now": colours["good"]})


def _count(number: int | None) -> str:
    return "" if number is None else short_text.count(number, widest=9_999)


def _text(text: str) -> str:
    return "" if text == short_text.NOTHING else text
