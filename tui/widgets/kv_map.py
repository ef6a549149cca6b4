"""The KV cells of an engine as a map, with what the tiers behind them hold.

One character for so many cells: a slot's digit in the slot's colour (underlined where others hold the cells too), dots
for prefixes kept for later, blank for free ones. Who holds most of a character's cells gives it its glyph.

Does not: choose the engine; the monitor shows the one of the selected request.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from textual.content import Content
from textual.widget import Widget

from localrun.snapshot import EngineRow, RequestRow
from localrun.tui import short_text
from localrun.tui.short_text import fit, line

_SLOT_GLYPHS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Holder(Enum):
    NOBODY = "·"
    KEPT = "░"
    REQUEST = "request"
    UNKNOWN = "?"


class Mark(NamedTuple):
    """One character. `slot` is that of the request, None where there is none."""

    glyph: str
    holder: Holder
    slot: int | None = None
    is_shared: bool = False


def kv_picture(engine: EngineRow, requests: Mapping[str, RequestRow], n_marks: int) -> list[Mark]:
    """At most `n_marks` characters for all cells of the engine, those of prompts in the making included."""
    runs = engine.kv_runs
    n_cells = max(engine.kv_cells, max((run.start + run.n_cells for run in runs), default=0))
    if not n_cells or n_marks < 1:
        return []
    cells_each = -(-n_cells // n_marks)
    n_marks = -(-n_cells // cells_each)
    held: list[dict[tuple[str | None, bool], int]] = [{} for _ in range(n_marks)]
    for run in runs:
        end = run.start + run.n_cells
        for index in range(run.start // cells_each, -(-end // cells_each)):
            overlap = min(end, (index + 1) * cells_each) - max(run.start, index * cells_each)
            key = (run.request, run.is_shared)
            held[index][key] = held[index].get(key, 0) + overlap
    return [_mark(holders, requests) for holders in held]


def _mark(holders: Mapping[tuple[str | None, bool], int], requests: Mapping[str, RequestRow]) -> Mark:
    if not holders:
        return Mark(Holder.NOBODY.value, Holder.NOBODY)
    # A request that holds any of it is worth seeing; between equals the one with the most cells.
    request, is_shared = max(holders, key=lambda key: (key[0] is not None, holders[key]))
    if request is None:
        return Mark(Holder.KEPT.value, Holder.KEPT, is_shared=is_shared)
    row = requests.get(request)
    if row is None or row.slot is None:
        return Mark(Holder.UNKNOWN.value, Holder.UNKNOWN, is_shared=is_shared)
    return Mark(_SLOT_GLYPHS[row.slot % len(_SLOT_GLYPHS)], Holder.REQUEST, row.slot, is_shared)


# Told apart side by side on dark and light; slots beyond take them again, the digit still differs.
_SLOT_COLOURS = (
    "$primary",
    "$accent",
    "$secondary",
    "$error",
    "$success",
    "$foreground",
    "$primary 60%",
    "$accent 60%",
)
_SEPARATOR = " · "
_LEGENDS = ("0-9 slot, underlined where shared, ░ kept, · free", "0-9 slot, ░ kept, · free")


class KvMap(Widget):
    """Shows `engine`; the requests are those of its snapshot."""

    engine: EngineRow | None = None

    def __init__(self) -> None:
        super().__init__()
        self._requests: dict[str, RequestRow] = {}

    def show(self, engine: EngineRow | None, requests: list[RequestRow]) -> None:
        slots = {row.id: row for row in requests if row.slot is not None}
        before, self.engine, self._requests = (_drawn(self.engine, self._requests), engine, slots)
        if before != _drawn(engine, slots):
            self.refresh()

    def render(self) -> Content:
        engine, (width, height) = self.engine, self.size
        if engine is None or not engine.kv_cells:
            return Content.styled("no model loaded", "$foreground 60%")
        rows = max(1, height - 3)
        marks = kv_picture(engine, self._requests, width * rows)
        lines = [self._title(engine, width)]
        lines += [_line(marks[at : at + width]) for at in range(0, len(marks), width)]
        lines.append(Content.styled(_tiers(engine, width), "$foreground"))
        lines.append(Content.styled(next((text for text in _LEGENDS if len(text) <= width), ""), "$foreground 55%"))
        return Content("\n").join(lines[:height])

    def _title(self, engine: EngineRow, width: int) -> Content:
        used = f"{short_text.cells(engine.kv_cells_used)}/{short_text.cells(engine.kv_cells)}"
        text = f"KV cells of {line(engine.model)}: {used}"
        if engine.kv_cells_shared:
            text += f", {short_text.cells(engine.kv_cells_shared)} shared"
        return Content.styled(fit(text, width), "$foreground 70%")


def _drawn(engine: EngineRow | None, requests: Mapping[str, RequestRow]) -> tuple[object, ...]:
    """What the picture depends on."""
    if engine is None:
        return ()
    cells = (engine.model, engine.kv_cells, engine.kv_cells_used, engine.kv_cells_shared, engine.kv_runs)
    return (*cells, _tiers(engine, 1_000), [(row.id, row.slot) for row in requests.values()])


def _line(marks: list[Mark]) -> Content:
    pieces = [
        Content.styled("".join(mark.glyph for mark in group), style)
        for style, group in ((style, list(group)) for style, group in groupby(marks, key=_style))
    ]
    return Content("").join(pieces)


def _style(mark: Mark) -> str:
    if mark.holder is Holder.REQUEST:
        assert mark.slot is not None
        colour = _SLOT_COLOURS[mark.slot % len(_SLOT_COLOURS)]
        return f"{colour} bold underline" if mark.is_shared else colour
    return "$foreground 45%" if mark.holder is Holder.NOBODY else "$foreground 75%"


def _tiers(engine: EngineRow, width: int) -> str:
    """As many whole facts as fit."""
    found = [f"RAM {short_text.size(engine.ram_cache_bytes)}", f"disk {short_text.size(engine.disk_cache_bytes)}"]
    if engine.prompt_tokens_total:
        share = engine.cached_tokens_total / engine.prompt_tokens_total
        found.append(f"{short_text.percent(share)} cached")
    restored = engine.ram_restored_tokens_total + engine.disk_restored_tokens_total
    if restored:
        found.append(f"{short_text.count(restored)} restored")
    while len(found) > 1 and len(_SEPARATOR.join(found)) > width:
        found.pop()
    return _SEPARATOR.join(found)
