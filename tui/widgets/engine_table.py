"""One row for each engine process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.style import Style

from localrun.snapshot import EngineRow
from localrun.tui import quantity
from localrun.tui.widgets.live_table import Column, LiveTable, Row


class EngineTable(LiveTable):
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("model", "engine", 11, right=False, grows=1),
        Column("pid", "pid", 7),
        Column("state", "state", 8, right=False),
        Column("slots", "slots", 5),
        Column("queued", "queue", 5, from_width=100),
        Column("kv", "KV cells", 11),
        Column("step", "step", 6),
        Column("target", "target", 6, from_width=100),
        Column("rss", "memory", 8),
        Column("expires", "expires", 7, gap=1),
    )

    def show_engines(self, engines: Sequence[EngineRow], colours: Mapping[str, Style]) -> None:
        """`colours` are styles by the names good, wait and bad."""
        self.show([_row(engine, colours) for engine in engines])


def _row(engine: EngineRow, colours: Mapping[str, Style]) -> Row:
    ready = engine.state == "ready"
    texts = {
        "model": engine.model,
        "pid": "" if engine.pid is None else str(engine.pid),
        "state": engine.state,
        "slots": f"{engine.slots_busy}/{engine.slots}" if engine.slots else "",
        "queued": str(engine.queued),
        "kv": f"{_cells(engine.kv_cells_used)}/{_cells(engine.kv_cells)}" if engine.kv_cells else "",
        "step": "" if engine.step_s is None else quantity.seconds(engine.step_s),
        "target": quantity.seconds(engine.target_itl_s) if engine.target_itl_s else "",
        "rss": "" if engine.rss_bytes is None else quantity.size(engine.rss_bytes),
        "expires": _expiry(engine) if ready else "",
    }
    state = colours["good"] if ready else colours["bad"] if engine.state == "failed" else colours["wait"]
    # Two engines never serve the same model, but one that stops and its successor may be seen together.
    return Row(f"{engine.model} {engine.pid}", texts, {"state": state})


def _cells(number: int) -> str:
    return quantity.count(number, widest=999)


def _expiry(engine: EngineRow) -> str:
    return "never" if engine.expires_in_s is None else quantity.age(engine.expires_in_s)
