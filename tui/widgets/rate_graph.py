"""Decode and prefill tokens/s of the last two minutes, with axes.

Decode is a filled area read on the left axis, prefill a line read on the right one: they differ by orders of magnitude,
and area and line are told apart without colour too. Drawn by plotext in braille dots, two columns to a cell. plotext
keeps one global figure; this is its only user.
"""

from __future__ import annotations

import plotext
from rich.style import Style
from rich.text import Text
from textual.widget import Widget

from localrun.tui import short_text
from localrun.tui.preferences import rich_style
from localrun.tui.rates import WINDOW_S, RateSeries, axis_top

_SMALLEST = (30, 6)
_IDLE_SNAPSHOTS = 40
_LABEL_WIDTH = 5

# plotext draws with these two codes; the theme's colours then take their place.
_DECODE_CODE, _PREFILL_CODE = 2, 3


class RateGraph(Widget):
    """Draws what `series` holds."""

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
        segments = self._series.segments(2 * (width - 2 * _LABEL_WIDTH - 2))
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
            aligned = [text.rjust(_LABEL_WIDTH) if side == "left" else text.ljust(_LABEL_WIDTH) for text in labels]
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
