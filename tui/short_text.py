"""What is drawn as short text: numbers (rates, durations, counts, sizes, moments), and text from elsewhere.

One place decides the digits, so that the same number reads the same on every screen and columns keep their width while
values change. A value that does not exist is `NOTHING`, never 0.

Client names, model names, error messages and the model's own words come from elsewhere and are made `visible`. Pure.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from rich.cells import cell_len, set_cell_size

from localrun.visible import visible

NOTHING = "–"


def rate(tokens_per_s: float | None) -> str:
    """Tokens per second without the unit: 8.4, 84.2, 842, 12.3k."""
    if tokens_per_s is None:
        return NOTHING
    if tokens_per_s < 99.95:
        return f"{tokens_per_s:.1f}"
    return count(round(tokens_per_s), widest=9_999)


def seconds(duration_s: float | None) -> str:
    """A measured time: 0.8 ms, 12 ms, 310 ms, 4.2 s, 62 s, 3m 05s."""
    if duration_s is None:
        return NOTHING
    if duration_s < 0.00995:
        return f"{duration_s * 1000:.1f} ms"
    if duration_s < 0.9995:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 9.95:
        return f"{duration_s:.1f} s"
    if duration_s < 99.5:
        return f"{duration_s:.0f} s"
    return age(duration_s)


def age(duration_s: float | None) -> str:
    """A time that counts up or down, in whole seconds: 7s, 3m 05s, 2h 07m."""
    if duration_s is None:
        return NOTHING
    total_s = max(0, round(duration_s))
    if total_s < 60:
        return f"{total_s}s"
    if total_s < 3600:
        return f"{total_s // 60}m {total_s % 60:02d}s"
    if total_s < 48 * 3600:
        return f"{total_s // 3600}h {total_s % 3600 // 60:02d}m"
    return f"{total_s // 86400}d"


def count(number: int | None, *, widest: int = 99_999) -> str:
    """A count: 7, 1,204; above `widest` 123k, 4.1M."""
    if number is None:
        return NOTHING
    if number <= widest:
        return f"{number:,}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        value = number / size
        if value < 99.95:
            return f"{value:.1f}{unit}"
        if value < 999.5:
            return f"{value:.0f}{unit}"
    return f"{number / 1e12:.1f}T"


def cells(number: int) -> str:
    """KV cells, short: 812, 32.8k."""
    return count(number, widest=999)


def when(time_s: float) -> str:
    """A moment, from seconds since the epoch, in this machine's time: 2031-05-04 17:20."""
    return datetime.fromtimestamp(time_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def size(size_bytes: int | None) -> str:
    """Bytes in decimal units, as the command line and download pages have them: 640 B, 12.0 MB, 3.1 GB."""
    if size_bytes is None:
        return NOTHING
    value = float(size_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"
        value /= 1000
    return f"{_three_digits(value)} TB"


def percent(share: float | None) -> str:
    """A share of 0..1 as 43%. Anything above nothing is at least 1%, anything below all at most 99%."""
    if share is None:
        return NOTHING
    whole = round(share * 100)
    if 0 < share < 1:
        whole = min(99, max(1, whole))
    return f"{whole}%"


def _three_digits(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


# --- text from elsewhere ---

_LINE_ENDS = re.compile("\r\n?|[\u2028\u2029]")


def block(text: str) -> str:
    """Text of several lines: line feeds and tabs stay."""
    return visible(_LINE_ENDS.sub("\n", text))


def line(text: str) -> str:
    """Text as a single line: every run of white space is one space."""
    return visible(" ".join(text.split()))


def fit(text: str, width: int) -> str:
    """One line, cut with an ellipsis when wider than `width` cells (a Chinese character or an emoji takes two)."""
    text = line(text)
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


def model(name: str, width: int) -> str:
    """A model's name in at most `width` cells. What is too wide goes without its folders, or its publisher: names that
    begin with the same path are told apart by their ends."""
    name = line(name)
    return name if cell_len(name) <= width else fit(name.rsplit("/", 1)[-1], width)


def column(text: str, width: int, *, right: bool = False) -> str:
    """One line of exactly `width` cells: cut or filled up with spaces."""
    text = fit(text, width)
    space = " " * (width - cell_len(text))
    return space + text if right else text + space
