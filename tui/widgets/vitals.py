"""The monitor's numbers: rates, latencies, cache and machine; the line about the selected request; and the graph of the
rates."""

from __future__ import annotations

import plotext
from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Digits, Static

from localrun.snapshot import Aggregate, Percentiles, RequestRow, Snapshot
from localrun.tui import short_text
from localrun.tui.preferences import rich_style
from localrun.tui.rates import WINDOW_S, RateSeries, axis_top
from localrun.tui.short_text import fit, line


class Throughput(Horizontal):
    """The aggregate decode and prefill rates as big numbers, or as a line where there are few rows."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: tuple[str, ...] = ()
        self._decode = Digits("0", classes="decode")
        self._prefill = Digits("0", classes="prefill")
        self._line = Static(id="rates")

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static("decode tok/s", classes="decode")
            yield self._decode
        with Vertical():
            yield Static("prefill tok/s", classes="prefill")
            yield self._prefill
        yield self._line

    def show(self, aggregate: Aggregate) -> None:
        """Whole tokens: a decimal that flickers says nothing."""
        rates = (aggregate.decode_tokens_per_s, aggregate.prefill_tokens_per_s)
        decode, prefill = shown = tuple(f"{round(each)}" for each in rates)
        if shown == self._shown:
            return
        self._shown = shown
        self._decode.update(decode)
        self._prefill.update(prefill)
        self._line.update(f"decode {decode}, prefill {prefill} tok/s")


_LABEL_WIDTH = 7
_EIGHTHS = " ▏▎▍▌▋▊▉"


class Vitals(Widget):
    """Six aligned lines of one snapshot; nothing before the first."""

    snapshot: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        """Draws only if a figure is another one as it is shown."""
        before = self.render()
        self.snapshot = snapshot
        if self.render() != before:
            self.refresh()

    def render(self) -> Content:
        if self.snapshot is None:
            return Content("")
        lines = [
            self._percentiles("TTFT", self.snapshot.aggregate.ttft_s),
            self._percentiles("ITL", self.snapshot.aggregate.itl_s),
            self._kv_cells(self.snapshot),
            self._load(self.snapshot),
            self._step(self.snapshot),
            self._machine(self.snapshot),
        ]
        if self.snapshot.system.gpus:  # the table of engines has the step too
            lines[-2] = self._gpus(self.snapshot)
        if self.size.height < len(lines):
            lines = [*lines[2:4], lines[-1]]
        return Content("\n").join(lines)

    def _percentiles(self, label: str, percentiles: Percentiles) -> Content:
        texts = [
            f"p50 {short_text.seconds(percentiles.p50):<7}",
            f"p95 {short_text.seconds(percentiles.p95):<7}",
            f"p99 {short_text.seconds(percentiles.p99)}",
        ]
        return _line(label, " ".join(texts[: 3 if self.size.width >= _LABEL_WIDTH + 36 else 2]))

    def _kv_cells(self, snapshot: Snapshot) -> Content:
        used = sum(engine.kv_cells_used for engine in snapshot.engines)
        total = sum(engine.kv_cells for engine in snapshot.engines)
        if not total:
            return _line("KV", "no model loaded")
        text = f" {short_text.count(used, widest=9_999)} of {short_text.count(total, widest=9_999)}"
        width = max(4, self.size.width - _LABEL_WIDTH - len(text))
        filled, rest = bar(used / total, width)
        return Content.assemble(
            _label("KV"),
            Content.styled(filled, "$primary"),
            Content.styled(rest, "$foreground 20%"),
            Content.styled(text, "$foreground"),
        )

    def _load(self, snapshot: Snapshot) -> Content:
        aggregate = snapshot.aggregate
        hits = short_text.percent(aggregate.prefix_hit_rate)
        queue = f"queue {aggregate.queued + aggregate.loading}"
        if aggregate.draft_hit_rate is None:
            return _line("prefix", f"{hits} cached   {queue}")
        return _line("prefix", f"{hits}  drafts {short_text.percent(aggregate.draft_hit_rate)}  {queue}")

    def _step(self, snapshot: Snapshot) -> Content:
        """The engine whose last step took longest, against its own target; and the longest step of the last minutes,
        with what most of it was."""
        timed = [(engine.step_s, engine.target_itl_s) for engine in snapshot.engines if engine.step_s is not None]
        if not timed:
            return _line("step", short_text.NOTHING)
        step_s, target_itl_s = max(timed, key=lambda pair: pair[0])
        text = short_text.seconds(step_s)
        target = f" of {short_text.seconds(target_itl_s)} target" if target_itl_s else ", no target"
        if (row := snapshot.longest_step) is None:
            return _line("step", text + target)
        longest = f"  longest {short_text.seconds(row.seconds)}"
        ways = (f"{text}{target}{longest} {row.main_part}", f"{text}{longest} {row.main_part}", text + longest)
        width = self.size.width - _LABEL_WIDTH
        return _line("step", next((way for way in ways if len(way) <= width), text + target))

    def _gpus(self, snapshot: Snapshot) -> Content:
        """All GPUs together: the busiest one, and the memory of all."""
        gpus = snapshot.system.gpus
        used, total = sum(gpu.memory_used_bytes for gpu in gpus), sum(gpu.memory_total_bytes for gpu in gpus)
        busy = max(gpu.busy_percent for gpu in gpus)
        return _line("GPU", f"{busy:.0f}%".ljust(5) + f"VRAM {used / 1e9:.1f} of {total / 1e9:.1f} GB")

    def _machine(self, snapshot: Snapshot) -> Content:
        system = snapshot.system
        used = system.memory_total_bytes - system.memory_available_bytes
        memory = f"{used / 1e9:.1f} of {system.memory_total_bytes / 1e9:.1f} GB"
        return _line("CPU", f"{system.cpu_percent:.0f}%".ljust(5) + f"RAM {memory}")


def bar(share: float, width: int) -> tuple[str, str]:
    """A bar of `width` cells in eighths of a cell: the filled part and the rest. More than nothing is always seen."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    whole, part = divmod(eighths, 8)
    filled = "█" * whole + (_EIGHTHS[part] if part else "")
    return filled, "░" * (width - len(filled))


def _label(text: str) -> Content:
    return Content.styled(text.ljust(_LABEL_WIDTH), "$foreground 60%")


def _line(label: str, text: str) -> Content:
    return Content.assemble(_label(label), Content.styled(text, "$foreground"))


_SEPARATOR = " · "
_ID_WIDTH = 13


_NARROW = 60  # where an error leaves no room for anything beside it


class RequestDetail(Widget):
    """One line below the request table: what the table has no room for. `row` is the selected request; `settings` are
    the table's order and whether it is paused."""

    row: reactive[RequestRow | None] = reactive(None)
    settings: reactive[str] = reactive("")

    def render(self) -> Content:
        if self.row is not None and self.row.error and self.size.width < _NARROW:
            return Content(fit(line(self.row.error), self.size.width))
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
        found.append(f"about {short_text.age(row.predicted_wait_s)} to wait")
    if row.slot is not None:
        found.append(f"slot {row.slot}")
    if row.draft_hit_rate is not None:
        speedup = "" if row.speedup is None else f", {row.speedup:.1f}x"
        found.append(f"drafts {short_text.percent(row.draft_hit_rate)}{speedup}")
    if row.tokens_per_s_avg is not None:
        found.append(f"avg {short_text.rate(row.tokens_per_s_avg)} tok/s")
    if row.itl_p50_s is not None:
        found.append(f"ITL {short_text.seconds(row.itl_p50_s)}")
    if row.resumed:
        found.append("resumed" if row.resumed == 1 else f"resumed {row.resumed} times")
    if row.finish_reason:
        found.append(line(row.finish_reason))
    return found


def _fit_facts(facts: list[str], width: int) -> str:
    """Whole facts as long as they fit; the last one may be cut when only it and the id are there (an error)."""
    kept = list(facts)
    while len(kept) > 2 and cell_len(_SEPARATOR.join(kept)) > width:
        kept.pop()
    return fit(_SEPARATOR.join(kept), width)


# --- the graph ---

_SMALLEST = (30, 6)
_IDLE_SNAPSHOTS = 40
_TICK_WIDTH = 5

# plotext draws with these two codes; the theme's colours then take their place.
_DECODE_CODE, _PREFILL_CODE = 2, 3


class RateGraph(Widget):
    """Decode and prefill tokens/s of the last two minutes, as `series` holds them, with axes.

    Decode is a filled area read on the left axis, prefill a line read on the right one: they differ by orders of
    magnitude, and area and line are told apart without colour too. Drawn by plotext in braille dots, two columns to a
    cell. plotext keeps one global figure; this is its only user in the terminal interface.
    """

    def __init__(self, series: RateSeries) -> None:
        super().__init__()
        self._series = series
        self._n_idle = 0

    def show(self) -> None:
        """Draws what is new. While nothing is computed, only how long that has been."""
        self._n_idle = 0 if any(self._series.peaks()) else self._n_idle + 1
        if self._n_idle % _IDLE_SNAPSHOTS in (0, 1):
            self.refresh()

    def render(self) -> Text:
        width, height = self.size
        if width < _SMALLEST[0] or height < _SMALLEST[1]:
            return Text("")
        styles = {_DECODE_CODE: rich_style(self.app, "primary"), _PREFILL_CODE: rich_style(self.app, "accent")}
        left, right = "█ decode tok/s", "prefill tok/s ╱"
        space = " " * (width - len(left) - len(right))
        legend = Text.assemble((left, styles[_DECODE_CODE]), space, (right, styles[_PREFILL_CODE]))
        return Text("\n").join([legend, _recoloured(self._plot(width, height - 1), styles)])

    def _plot(self, width: int, height: int) -> str:
        decode_top, prefill_top = (axis_top(peak) for peak in self._series.peaks())
        plotext.clear_figure()
        plotext.theme("clear")
        plotext.plotsize(width, height)
        # An axis exists for plotext only once something is plotted on it, so both get a point that cannot be seen.
        for side in ("left", "right"):
            plotext.scatter([0], [0], marker=" ", yside=side)
        segments = self._series.segments(2 * (width - 2 * _TICK_WIDTH - 2))
        for segment in segments:
            ages_s, rates = segment.ages_s, segment.decode_tokens_per_s
            plotext.plot(ages_s, rates, marker="braille", color=_DECODE_CODE, yside="left", fillx=True)
        for segment in segments:
            ages_s, rates = segment.ages_s, segment.prefill_tokens_per_s
            plotext.plot(ages_s, rates, marker="braille", color=_PREFILL_CODE, yside="right")
        for side, top in (("left", decode_top), ("right", prefill_top)):
            plotext.ylim(0, top, yside=side)
            ticks = [0.0, top / 2, top]
            labels = [short_text.count(round(tick), widest=9_999) for tick in ticks]
            aligned = [text.rjust(_TICK_WIDTH) if side == "left" else text.ljust(_TICK_WIDTH) for text in labels]
            plotext.yticks(ticks, aligned, yside=side)
        plotext.xlim(-WINDOW_S, 0)
        plotext.xticks([-WINDOW_S, -WINDOW_S / 2, 0], ["-2 min", "-1 min", "now"])
        plotext.xaxes(True, False)
        drawn: str = plotext.build()
        return drawn


def _recoloured(drawn: str, styles: dict[int, Style]) -> Text:
    text = Text.from_ansi(drawn.rstrip("\n"))
    found = Text(text.plain, no_wrap=True)
    for start, end, style in text.spans:
        number = style.color.number if isinstance(style, Style) and style.color is not None else None
        if number in styles:
            found.stylize(styles[number], start, end)
    return found
