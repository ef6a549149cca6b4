"""A table whose rows come and go and whose cells change several times a second.

Rows are known by key. `show` compares with what is on the screen: it updates the cells that differ, adds and removes
rows, and reorders only when the order differs, keeping the cursor on its row. Nothing is cleared, except when the width
of the terminal asks for another set of columns.

To the library a row is one wide cell: it renders every visible cell anew whenever any of them changes, and that many
small ones took four fifths of the monitor's time.

Does not: know what a row means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual import events
from textual.widgets import DataTable

from localrun.tui.plain_text import column as aligned


@dataclass(frozen=True)
class Column:
    """`width` and the `gap` after it are in cells. `grows` is its share of the space left over. `from_width` is the
    terminal width from which the column is shown."""

    key: str
    label: str
    width: int
    right: bool = True
    grows: int = 0
    from_width: int = 0
    gap: int = 2


@dataclass(frozen=True)
class Row:
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
    COLUMNS: ClassVar[tuple[Column, ...]] = ()

    def __init__(self, *, cursor: bool) -> None:
        super().__init__(
            cursor_type="row" if cursor else "none", cursor_foreground_priority="renderable", cell_padding=0
        )
        self._shown_columns: list[Column] = []
        self._rows: dict[str, Row] = {}
        self._order: list[str] = []

    @property
    def selected_key(self) -> str | None:
        """The key of the row below the cursor."""
        return self._order[self.cursor_row] if 0 <= self.cursor_row < len(self._order) else None

    def on_resize(self, event: events.Resize) -> None:
        self._fit_columns(event.size.width)

    def show(self, rows: Sequence[Row]) -> None:
        """Makes the table show exactly these rows in this order."""
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
            elif self._differ(before, row):
                self.update_cell(key, _CELL, self._cell(row))
        self._order = [key for key in self._order if key in wanted]
        self._order += [key for key in wanted if key not in self._rows]
        self._rows = wanted
        self._reorder([row.key for row in rows], selected)

    def _differ(self, before: Row, row: Row) -> bool:
        return before.styles != row.styles or any(
            before.texts.get(column.key) != row.texts.get(column.key) for column in self._shown_columns
        )

    def _reorder(self, order: list[str], selected: str | None) -> None:
        if order != self._order:
            rank = {key: index for index, key in enumerate(order)}
            self.sort(_CELL, key=lambda cell: rank[cell.row_key])
            self._order = order
        if selected in self._rows and selected != self.selected_key:
            self.move_cursor(row=order.index(selected), animate=False)

    def _cell(self, row: Row) -> KeyedText:
        cell = KeyedText(style=row.styles.get("", Style.null()), no_wrap=True, end="")
        cell.row_key = row.key
        for column in self._shown_columns:
            cell.append(self._aligned(row.texts.get(column.key, ""), column), row.styles.get(column.key))
            cell.append(" " * column.gap)
        return cell

    def _aligned(self, text: str, column: Column) -> str:
        text = aligned(text, column.width, right=column.right)
        return _INDENT + text if column is self._shown_columns[0] else text

    def _fit_columns(self, width: int) -> None:
        """Chooses the columns for a width and spreads what is left over the ones that grow."""
        columns = [column for column in self.COLUMNS if width >= column.from_width]
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
