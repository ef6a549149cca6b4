"""Charts for a terminal: bars of block characters, and the decode curve.

Text without colours: it must be readable in a log file, and series are told apart by their marks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from localrun.bench.decode_curve import CurvePoint

_EIGHTHS = " ▏▎▍▌▋▊▉"
_MARKS = ("o", "x", "+", "*")
_BOUND_MARK = "dot"


def bars(rows: Sequence[tuple[str, float, str]], *, width: int = 40) -> list[str]:
    """A bar per row of (label, value, value as text), the highest value `width` characters long. Values are >= 0."""
    highest = max((value for _, value, _ in rows), default=0.0)
    label_width = max((len(label) for label, _, _ in rows), default=0)
    return [f"{label:<{label_width}}  {_bar(value, highest, width)} {text}" for label, value, text in rows]


def decode_chart(curves: Mapping[str, Sequence[CurvePoint]], *, width: int = 78, height: int = 20) -> str:
    """Tokens per second of all streams together over the number of streams, both logarithmic, one curve per server, and
    the bound where it is known. Empty without points."""
    streams = sorted({point.streams for points in curves.values() for point in points})
    if not streams:
        return ""
    # A quarter of the time of `localrun --help`; and it is needed for this one picture.
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height)
    plotext.title("decode: tokens per second by number of streams")
    at = {n_streams: index for index, n_streams in enumerate(streams)}
    for (name, points), mark in zip(curves.items(), _MARKS, strict=False):
        positions, rates = [at[point.streams] for point in points], [point.tokens_per_s for point in points]
        plotext.plot(positions, rates, marker=mark, label=name)
    bound = {p.streams: p.bound_tokens_per_s for points in curves.values() for p in points if p.bound_tokens_per_s}
    if bound:
        plotext.plot([at[n_streams] for n_streams in bound], list(bound.values()), marker=_BOUND_MARK, label="bound")
    plotext.yscale("log")
    plotext.xticks(list(at.values()), [str(n_streams) for n_streams in streams])
    plotext.xlabel("streams")
    rates = [point.tokens_per_s for points in curves.values() for point in points] + list(bound.values())
    ticks = _round_numbers(min(rates), max(rates))
    plotext.yticks(ticks, [f"{tick:g}" for tick in ticks])
    drawn = plotext.uncolorize(plotext.build())
    return "\n".join(line.rstrip() for line in str(drawn).splitlines())


def _round_numbers(lowest: float, highest: float) -> list[float]:
    """1, 2 and 5 times powers of ten between the two."""
    exponents = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
    numbers = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    return [number for number in numbers if lowest <= number <= highest]


def _bar(value: float, highest: float, width: int) -> str:
    eighths = round(8 * width * value / highest) if highest > 0 else 0
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")
