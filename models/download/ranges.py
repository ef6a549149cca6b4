"""Which bytes of a file are there: a sorted list of disjoint half-open ranges. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Range(NamedTuple):
    """Bytes `start` to `end`, without the one at `end`."""

    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


class RangeSet:
    """Ranges that touch or overlap become one."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.n_bytes = 0
        for each in ranges:
            self.add(each)

    def __iter__(self) -> Iterator[Range]:
        return map(Range, self._starts, self._ends)

    def add(self, added: Range) -> None:
        """Raises ValueError for a range that begins before 0 or ends before it begins."""
        start, end = added
        if not 0 <= start <= end:
            raise ValueError(f"{start} to {end} is no range")
        if start == end:
            return
        # Those that end before `start` stay as they are, and those that begin after `end`.
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        replaced = sum(self._ends[first:last]) - sum(self._starts[first:last])
        self._starts[first:last], self._ends[first:last] = [start], [end]
        self.n_bytes += end - start - replaced

    def missing(self, within: Range) -> list[Range]:
        """The parts of `within` that are not there, in order."""
        gaps = []
        position = within.start
        for start, end in self:
            if end <= position:
                continue
            if start >= within.end:
                break
            if start > position:
                gaps.append(Range(position, start))
            position = end
        if position < within.end:
            gaps.append(Range(position, within.end))
        return gaps


def split(ranges: Iterable[Range], part_bytes: int) -> list[Range]:
    """The ranges in pieces of at most `part_bytes`, in order."""
    return [
        Range(start, min(start + part_bytes, end))
        for whole_start, end in ranges
        for start in range(whole_start, end, part_bytes)
    ]
