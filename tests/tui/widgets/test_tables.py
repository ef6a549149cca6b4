"""Tables of the monitor: what their cells have room for."""

from __future__ import annotations

import pytest
from textual.style import Style

from localrun.snapshot import BatchRow
from localrun.tui.widgets.tables import BatchTable, _batch_row


@pytest.mark.parametrize(("n_done", "n_lines"), [(0, 9), (12_345, 50_000), (99_900, 99_949), (123_456, 999_000)])
def test_the_counts_of_a_batch_are_whole(n_done: int, n_lines: int):
    row = BatchRow(id="b", api="", model="m", state="in_progress", lines=n_lines, succeeded=n_done)
    shown = _batch_row(row, dict.fromkeys(("good", "wait", "bad"), Style.null())).texts["done"]
    assert len(shown) <= next(column.width for column in BatchTable.COLUMNS if column.key == "done")
