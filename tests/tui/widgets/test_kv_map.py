from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localrun.snapshot import EngineRow, KvRunRow, RequestRow, RequestState
from localrun.tui.widgets.kv_map import Holder, kv_picture


def _request(name: str, slot: int | None) -> RequestRow:
    return RequestRow(
        id=name, client="c", api="/api/chat", model="m", lane="default", state=RequestState.DECODE, slot=slot
    )


REQUESTS = {row.id: row for row in (_request("a", 3), _request("b", 11), _request("waiting", None))}


def _engine(kv_cells: int, *runs: tuple[int, int, str | None, bool]) -> EngineRow:
    return EngineRow(model="m", pid=1, state="ready", kv_cells=kv_cells, kv_runs=[KvRunRow(*run) for run in runs])


def test_slots_are_digits_and_letters():
    engine = _engine(6, (0, 1, "a", False), (1, 1, "b", True), (2, 1, None, False), (3, 1, "waiting", False))
    assert "".join(mark.glyph for mark in kv_picture(engine, REQUESTS, 6)) == "3b░?··"
    assert [mark.is_shared for mark in kv_picture(engine, REQUESTS, 6)][:3] == [False, True, False]


def test_a_request_is_seen_however_few_its_cells_are():
    engine = _engine(1000, (0, 999, None, False), (999, 1, "a", False))
    assert [mark.glyph for mark in kv_picture(engine, REQUESTS, 4)] == ["░", "░", "░", "3"]


def test_cells_beyond_the_pool_belong_to_the_picture():
    assert len(kv_picture(_engine(8, (8, 8, "a", False)), REQUESTS, 16)) == 16


def test_without_cells_there_is_no_picture():
    assert kv_picture(_engine(0), REQUESTS, 10) == []


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), max_size=8), st.integers(1, 300), st.integers(1, 400)
)
def test_marks_are_free_exactly_where_no_run_reaches(pairs: list[tuple[int, int]], n_marks: int, n_cells: int):
    runs, at = [], 0
    for gap, length in pairs:
        runs.append((at + gap, length, "a", False))
        at += gap + length
    marks = kv_picture(_engine(n_cells, *runs), REQUESTS, n_marks)
    assert 0 < len(marks) <= n_marks
    total = max(n_cells, at)
    cells_each = -(-total // n_marks)
    for index, mark in enumerate(marks):
        used = any(start < (index + 1) * cells_each and start + n > index * cells_each for start, n, _, _ in runs)
        assert (mark.holder is Holder.NOBODY) == (not used)
