"""One line below the request table: what the table has no room for, and how the table is set."""

from __future__ import annotations

from rich.cells import cell_len
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localrun.snapshot import RequestRow
from localrun.tui import quantity
from localrun.tui.plain_text import fit, line

_SEPARATOR = " · "
_ID_WIDTH = 13


class RequestDetail(Widget):
    """`row` is the selected request; `settings` are the table's order and whether it is paused."""

    row: reactive[RequestRow | None] = reactive(None)
    settings: reactive[str] = reactive("")

    def render(self) -> Content:
        room = self.size.width - len(self.settings) - 2
        left = "" if self.row is None else _fit_facts(_facts(self.row), room)
        space = " " * max(1, self.size.width - cell_len(left) - len(self.settings))
        return Content.assemble(left, space, Content.styled(self.settings, "$primary"))


def _facts(row: RequestRow) -> list[str]:
    name = fit(row.id, _ID_WIDTH)
    if row.error:
        return [name, line(row.error)]
    found = [name, line(f"{row.api} {row.lane}")]
    if row.queue_position is not None:
        found.append(f"place {row.queue_position}")
    if row.predicted_wait_s is not None:
        found.append(f"about {quantity.age(row.predicted_wait_s)} to wait")
    if row.slot is not None:
        found.append(f"slot {row.slot}")
    if row.tokens_per_s_avg is not None:
        found.append(f"avg {quantity.rate(row.tokens_per_s_avg)} tok/s")
    if row.itl_p50_s is not None:
        found.append(f"ITL {quantity.seconds(row.itl_p50_s)}")
    if row.finish_reason:
        found.append(line(row.finish_reason))
    return found


def _fit_facts(facts: list[str], width: int) -> str:
    """Whole facts as long as they fit; the last one may be cut when only it and the id are there (an error)."""
    kept = list(facts)
    while len(kept) > 2 and cell_len(_SEPARATOR.join(kept)) > width:
        kept.pop()
    return fit(_SEPARATOR.join(kept), width)
