"""All that is known of one model or of one request, a label and its text a line; and what was used.

Of a model that is what `/api/show` and `/localrun/v1/fit` say; a request is followed in the snapshots while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from msgspec.structs import replace
from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from localrun.errors import LocalrunError
from localrun.snapshot import RequestRow, Snapshot, UsageReport, UsageRow
from localrun.tui import short_text
from localrun.tui.keys import bind
from localrun.tui.rates import sparkline
from localrun.tui.screens.dialog import Dialog
from localrun.tui.session import Session
from localrun.tui.short_text import block, column, count, line

_LABEL_WIDTH = 16
_LICENCE_LINES = 3
_SPARK_WIDTH = 48


def _labelled(label: str, text: str | Content) -> Content:
    return Content.assemble(Content.styled(label.ljust(_LABEL_WIDTH), "$foreground 60%"), text)


class ModelDetailScreen(Dialog[None]):
    """`model` is the name of one that is here."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q,ctrl+g", "dismiss", "Close")]

    def __init__(self, session: Session, model: str) -> None:
        super().__init__()
        self._session = session
        self._model = model
        self._text = Static("Asking the daemon…")

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = Content(line(self._model))
            box.border_subtitle = "Esc closes"
            yield self._text

    def on_mount(self) -> None:
        self.run_worker(self._load(), name="detail")

    async def _load(self) -> None:
        daemon = self._session.daemon
        try:
            facts = [*model_facts(await daemon.show(self._model)), *fit_facts(await daemon.fit(self._model))]
        except LocalrunError as error:
            self._text.update(Content(line(error.message)))
            return
        self._text.update(Content("\n").join([_labelled(label, block(text)) for label, text in facts]))


def model_facts(shown: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and text of what `/api/show` says."""
    details, info = shown.get("details") or {}, shown.get("model_info") or {}
    architecture = info.get("general.architecture", details.get("family", ""))
    context = info.get(f"{architecture}.context_length")
    licence = " ".join(str(shown.get("license") or "").split("\n")[:_LICENCE_LINES])
    found = [
        ("architecture", str(architecture)),
        ("parameters", str(details.get("parameter_size") or "")),
        ("quantization", str(details.get("quantization_level") or "")),
        ("trained context", short_text.count(context) if isinstance(context, int) else ""),
        ("can", ", ".join(map(str, shown.get("capabilities") or ()))),
        ("parameters set", str(shown.get("parameters") or "").replace("\n", ", ")),
        ("system prompt", str(shown.get("system") or "")),
        ("licence", line(licence)),
    ]
    return [(label, text) for label, text in found if text]


def fit_facts(fit: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and text of what `/localrun/v1/fit` says of this machine."""
    found = [
        ("", ""),
        ("on this machine", "fits" if fit.get("fits") else line(str(fit.get("problem") or "does not fit"))),
    ]
    if fit.get("kv_cells"):
        context = f"{short_text.count(fit['context'])} tokens, {fit['slots']} slots"
        found.append(("context", f"{context}, KV cells {short_text.count(fit['kv_cells'])} in {fit['kv_type']}"))
    for device in fit.get("devices") or ():
        parts = [
            f"{name} {short_text.size(device[f'{name}_bytes'])}"
            for name in ("weights", "kv", "compute", "other")
            if device.get(f"{name}_bytes")
        ]
        total = f"{short_text.size(device['total_bytes'])} of {short_text.size(device['usable_bytes'])}"
        found.append((line(str(device["name"])), f"{total}: {', '.join(parts)}"))
    if draft := fit.get("draft"):
        took = f"{short_text.size(draft['total_bytes'])} of {draft['device']}"
        found.append(("draft model", line(f"{draft['model']}, {took}")))
    found += [("", line(str(note))) for note in fit.get("notes") or ()]
    return found


class RequestScreen(Dialog[None]):
    """`row` is how the request stood when it was opened."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q", "dismiss", "Close"),
        bind("monitor.cancel", "cancel"),
    ]

    def __init__(self, session: Session, row: RequestRow) -> None:
        super().__init__()
        self._session = session
        self._row = row
        self._facts = Static()

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = Content(line(self._row.id))
            box.border_subtitle = Content(f"{self._session.key('monitor.cancel')} cancels · Esc closes")
            yield self._facts

    def on_mount(self) -> None:
        self._session.snapshots.subscribe(self, self._on_snapshot)
        self._show()

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        now = next((row for row in snapshot.requests if row.id == self._row.id), self._row)
        self._row = replace(now, client=self._row.client)  # as it is called in the table
        self._show()

    def on_click(self, event: events.Click) -> None:
        if event.widget is self:
            self.dismiss()

    def _show(self) -> None:
        rates = self._session.request_rates
        lines = [_labelled(label, line(text)) for label, text in request_facts(self._row)]
        drawn = sparkline(rates.of(self._row.id), _SPARK_WIDTH, max(rates.of(self._row.id), default=0.0))
        if drawn:
            lines.append(_labelled("last minute", Content.styled(drawn, "$primary")))
        self._facts.update(Content("\n").join(lines))

    def action_cancel(self) -> None:
        self.run_worker(cancel(self, self._session, self._row), group="cancel")


async def cancel(screen: Screen[None], session: Session, row: RequestRow) -> None:
    """Cancels a request, and says what came of it."""
    if row.state.is_final:
        screen.notify("This request has ended already.", severity="warning")
        return
    try:
        cancelled = await session.daemon.cancel(row.id)
    except LocalrunError as error:
        screen.notify(line(error.message), title="Not cancelled", severity="error", markup=False)
        return
    if cancelled:
        screen.notify(line(f"Cancelled the request of {row.client}."), markup=False)
    else:
        screen.notify(line(f"The request of {row.client} had already ended."), severity="warning", markup=False)


def _times(n_resumed: int) -> str | None:
    """How often a request went on after the death of its engine."""
    if not n_resumed:
        return None
    return "once, after its engine died" if n_resumed == 1 else f"{n_resumed} times, after its engines died"


def request_facts(row: RequestRow) -> list[tuple[str, str]]:
    """Label and text of all that is known, in reading order; what is not known is left out."""
    found: list[tuple[str, str | None]] = [
        ("state", f"{row.state}{f' ({row.finish_reason})' if row.finish_reason else ''}"),
        ("resumed", _times(row.resumed)),
        ("error", row.error),
        ("client", row.client),
        ("route", row.api),
        ("model", row.model),
        ("tier", row.tier or None),
        ("lane", row.lane),
        ("slot", None if row.slot is None else str(row.slot)),
        ("queue", None if row.queue_position is None else f"place {row.queue_position}"),
        ("expected wait", None if row.predicted_wait_s is None else short_text.age(row.predicted_wait_s)),
        ("prompt", _prompt_text(row)),
        ("output", f"{short_text.count(row.output_tokens)} tokens" if row.output_tokens else None),
        ("drafts", _drafts_text(row)),
        ("speedup", None if row.speedup is None else f"{row.speedup:.1f}x with drafts"),
        ("now", _rate_text(row.tokens_per_s)),
        ("average", _rate_text(row.tokens_per_s_avg)),
        ("TTFT", None if row.ttft_s is None else short_text.seconds(row.ttft_s)),
        ("between tokens", None if row.itl_p50_s is None else f"{short_text.seconds(row.itl_p50_s)} (median)"),
        ("age", short_text.age(row.age_s)),
    ]
    return [(label, text) for label, text in found if text]


def _prompt_text(row: RequestRow) -> str | None:
    if row.prompt_tokens is None:
        return None
    text = f"{short_text.count(row.prompt_tokens)} tokens"
    if row.cached_tokens:
        text += f", {short_text.count(row.cached_tokens)} of them cached"
    if row.computed_tokens < row.prompt_tokens:
        text += f", {short_text.count(row.computed_tokens)} done so far"
    return text


def _drafts_text(row: RequestRow) -> str | None:
    if not row.drafted_tokens:
        return None
    kept, made = short_text.count(row.accepted_tokens), short_text.count(row.drafted_tokens)
    sources = ", ".join(
        f"{line(one.source)} {short_text.count(one.accepted_tokens)}/{short_text.count(one.drafted_tokens)}"
        for one in row.drafts
    )
    return f"{kept} of {made} tokens kept" + (f": {sources}" if sources else "")


def _rate_text(tokens_per_s: float | None) -> str | None:
    return None if tokens_per_s is None else f"{short_text.rate(tokens_per_s)} tok/s"


_BY = ("key", "day", "model")
_DAYS = (30, 365, 1, 7)
_NUMBERS = {"requests": "requests", "prompt": "prompt_tokens", "cached": "cached_tokens", "output": "output_tokens"}
_NOTHING = "Nothing was counted."


class UsageScreen(Dialog[None]):
    """What was used, by API key, day or model, as `/localrun/v1/usage` says when it is opened and whenever another view
    is chosen; a key that is no admin's sees its own. The numbers are tokens but for the requests'; those of prompts
    include cached ones."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q,u", "dismiss", "Close"),
        bind("usage.by", "by"),
        bind("usage.days", "days"),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._by, self._days = _BY[0], _DAYS[0]
        self._text = Static("Asking the daemon…")

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            by, days = (self._session.key(f"usage.{what}") for what in ("by", "days"))
            self.hint(box, f"{by} key, day or model", f"{days} days", "Esc closes")
            yield self._text

    def on_mount(self) -> None:
        self._ask()

    def action_by(self) -> None:
        self._by = _BY[(_BY.index(self._by) + 1) % len(_BY)]
        self._ask()

    def action_days(self) -> None:
        self._days = _DAYS[(_DAYS.index(self._days) + 1) % len(_DAYS)]
        self._ask()

    @work(name="usage", group="usage", exclusive=True)
    async def _ask(self) -> None:
        try:
            report = await self._session.daemon.usage(self._by, self._days)
        except LocalrunError as error:
            self._text.update(Content(line(error.message)))
            return
        self.query_one(VerticalScroll).border_title = Content(f"Use by {report.by}, since {report.since}")
        self._text.update(_table(report, is_narrow=self.app.size.width < 100))


def _table(report: UsageReport, *, is_narrow: bool) -> Content:
    """In a narrow window without the cached tokens, and with round numbers."""
    if not report.rows:
        return Content(_NOTHING)
    name_width, number_width, widest = (8, 8, 99_999) if is_narrow else (26, 14, 10**12)
    fields = {name: field for name, field in _NUMBERS.items() if not (is_narrow and name == "cached")}

    def shown(name: str, numbers: Iterable[str]) -> str:
        return column(line(name) or "(no model)", name_width) + "".join(
            column(number, number_width, right=True) for number in numbers
        )

    sums = {field: sum(getattr(row, field) for row in report.rows) for field in _NUMBERS.values()}
    rows = [
        shown(row.name, (count(getattr(row, field), widest=widest) for field in fields.values()))
        for row in (*report.rows, UsageRow(name="together", **sums))
    ]
    head = Content.styled(shown(report.by, fields), "$foreground 60%")
    return Content("\n").join([head, *map(Content, rows[:-1]), Content.styled(rows[-1], "bold")])
