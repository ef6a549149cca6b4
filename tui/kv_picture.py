"""The KV cells of one engine as a picture of so many characters. Pure.

Every character stands for the same number of cells and shows who holds most of them: the slot of a request, a prefix
that is kept for later, or nobody; and whether more than one request holds them. Slots are digits, so the picture reads
without colour.

Does not: know colours, or the cells of anything but the snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from localrun.snapshot import EngineRow, RequestRow

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
