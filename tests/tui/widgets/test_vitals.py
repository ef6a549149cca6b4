"""The lines beside the graph."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from textual.app import App, ComposeResult

from localrun.snapshot import LongStepRow
from localrun.tui.widgets.vitals import Vitals
from tests.tui.conftest import TINY, snapshot_of


class _Window(App[None]):
    def compose(self) -> ComposeResult:
        yield Vitals()


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (60, "20 ms of 140 ms target  longest 205 ms move"),
        (40, "20 ms  longest 205 ms move"),
        (31, "20 ms  longest 205 ms"),
        (27, "20 ms of 140 ms target"),
    ],
)
async def test_the_longest_step_is_shown_with_what_most_of_it_was(desk: Any, width: int, text: str) -> None:
    longest = LongStepRow(1000.0, 0.205, 0.01, 0, 8, 0, 8, {"move": 0.18, "decode": 0.025})
    shorter = LongStepRow(1000.0, 0.03, 0.03, 0, 8, 0, 8, {"decode": 0.03})
    engine = msgspec.structs.replace(TINY, step_s=0.02, target_itl_s=0.14, long_steps=[longest, shorter])
    app = _Window()
    async with app.run_test(size=(width, 10)) as pilot:
        app.query_one(Vitals).show(snapshot_of(engines=(engine,)))
        await pilot.pause()
        assert text in " ".join(desk.seen(app).split("\n"))
