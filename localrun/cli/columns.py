"""Plain text for people: aligned columns, sizes and durations.

Pure. Does not: print, or know a terminal's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

_UNITS = ("B", "KB", "MB", "GB", "TB")


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns with two spaces between them."""
    lines = [header, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(header))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def size(n_bytes: float) -> str:
    """Decimal units, as file managers and download pages use them: 1500000 is `1.5 MB`."""
    for unit in _UNITS:
        if n_bytes < 1000 or unit == _UNITS[-1]:
            return f"{n_bytes:.0f} {unit}" if n_bytes >= 10 or unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    raise AssertionError("the loop ends with the last unit")


def duration(seconds: float) -> str:
    """Short, with the unit that suits: `250 ms`, `1.25 s`, `2 min 5 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def ago(moment: datetime, now: datetime) -> str:
    """How long ago, in the largest unit."""
    elapsed = max(now - moment, timedelta())
    for unit, length in (("day", timedelta(days=1)), ("hour", timedelta(hours=1)), ("minute", timedelta(minutes=1))):
        count = elapsed // length
        if count:
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"
