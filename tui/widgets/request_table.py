"""The requests of the daemon, running ones first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rich.style import Style

from localrun.snapshot import RequestRow, RequestState
from localrun.tui import quantity
from localrun.tui.answer_progress import prefill_percent
from localrun.tui.request_rates import RequestRates, sparkline
from localrun.tui.widgets.live_table import Column, LiveTable, Row

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
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("state", "state", 11, right=False, gap=1),
        Column("client", "client", 9, right=False, grows=2),
        Column("api", "api", 12, right=False, from_width=108),
        Column("model", "model", 7, right=False, grows=1),
        Column("lane", "lane", 11, right=False, from_width=119),
        Column("slot", "slot", 4, from_width=94),
        Column("prompt", "prompt", 6),
        Column("cached", "cached", 6),
        Column("output", "output", 6),
        Column("now", "tok/s", 5),
        Column("avg", "avg", 5, from_width=94),
        Column("trend", "lately", 10, right=False, from_width=140),
        Column("ttft", "TTFT", 6),
        Column("itl", "ITL", 6, from_width=128),
        Column("age", "age", 6, gap=1),
    )

    def show_requests(
        self, requests: Sequence[RequestRow], sort: str, rates: RequestRates, colours: Mapping[str, Style]
    ) -> None:
        """`colours` are styles by the names good, wait, bad, rate and dim."""
        order = SORTS[sort]
        rows = sorted(requests, key=lambda row: (row.state.is_final, order(row), row.id))
        top = rates.top()
        self.show([_row(row, sparkline(rates.of(row.id), TREND_WIDTH, top), colours) for row in rows])


def _row(row: RequestRow, trend: str, colours: Mapping[str, Style]) -> Row:
    prefilling = row.state is RequestState.PREFILL
    state = f"prefill {prefill_percent(row)}" if prefilling else str(row.state)
    texts = {
        "state": state,
        "client": row.client,
        "api": row.api.removeprefix("/"),
        "model": row.model,
        "lane": row.lane,
        "slot": "" if row.slot is None else str(row.slot),
        "prompt": _count(row.prompt_tokens),
        "cached": _count(row.cached_tokens),
        "output": _count(row.output_tokens or None),
        "now": "" if row.state.is_final else _text(quantity.rate(row.tokens_per_s)),
        "avg": _text(quantity.rate(row.tokens_per_s_avg)),
        "trend": trend,
        "itl": _text(quantity.seconds(row.itl_p50_s)),
        "ttft": _text(quantity.seconds(row.ttft_s)),
        "age": quantity.age(row.age_s),
    }
    if row.state.is_final:
        return Row(row.id, texts, {"": colours["dim"], **({"state": colours["bad"]} if row.error else {})})
    colour = colours["good"] if row.state is RequestState.DECODE else colours["wait"]
    return Row(row.id, texts, {"state": colour, "now": colours["good"]})


def _count(number: int | None) -> str:
    return "" if number is None else quantity.count(number, widest=9_999)


def _text(text: str) -> str:
    return "" if text == quantity.NOTHING else text
