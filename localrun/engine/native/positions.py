"""Where the rows of a sequence stand. Pure.

The engine counts tokens: row number i of a sequence is its *index*, and takes a cell. Most models number positions the
same way. For some that see (M-RoPE) a picture of twelve rows has four positions, and all of its rows stand at the first
of them, apart by x and y; so behind it, positions are behind indices.

Does not: know what is in the cells.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import MediaChunk
from localrun.wire import MediaKind

# More than any context has cells.
MOST_TOKENS = 1 << 30


class _Span(NamedTuple):
    """A chunk: its rows have indices [start, end), and positions [first, last)."""

    start: int
    end: int
    first: int
    last: int


class Positions:
    """Of a sequence with these chunks, each with the index of its first row. With `has_parts` all rows of a picture
    stand at one position, also where it takes as many as it has rows, being one row high or wide.

    Raises ValueError for chunks that are not in order, or that no sequence can have."""

    def __init__(self, chunks: tuple[tuple[int, MediaChunk], ...] = (), *, has_parts: bool = False) -> None:
        self._spans: list[_Span] = []
        end = n_behind = 0
        for start, chunk in chunks:
            if not end <= start < start + chunk.n_tokens <= MOST_TOKENS or not 0 < chunk.n_pos <= chunk.n_tokens:
                raise ValueError(f"a chunk of {chunk.n_tokens} rows and {chunk.n_pos} positions at index {start}")
            end = start + chunk.n_tokens
            if chunk.n_pos != chunk.n_tokens or (has_parts and chunk.media.kind is MediaKind.IMAGE):
                first = start - n_behind
                self._spans.append(_Span(start, end, first, first + chunk.n_pos))
                n_behind = end - (first + chunk.n_pos)
        # A row is behind its index by as much as the last chunk before it ends earlier.
        self._ends = np.array([span.end for span in self._spans], np.int64)
        self._behind = np.array([0, *(span.end - span.last for span in self._spans)], np.int32)

    def __bool__(self) -> bool:
        """Whether positions and indices differ."""
        return bool(self._spans)

    def is_inside(self, index: int) -> bool:
        """Whether this is a row of a chunk, and not its first, whose rows have no positions of their own."""
        return any(span.start < index < span.end for span in self._spans)

    def at(self, index: int, *, behind: bool = False) -> int:
        """The position of a row. Inside of a chunk that is where the chunk begins, or the first one `behind` it."""
        n_behind = 0
        for span in self._spans:
            if index <= span.start:
                break
            if index < span.end:
                return span.last if behind else span.first
            n_behind = span.end - span.last
        return index - n_behind

    def of_rows(self, indices: NDArray[np.int32]) -> NDArray[np.int32]:
        """The positions of rows that are not inside of chunks."""
        found: NDArray[np.int32] = indices - self._behind[np.searchsorted(self._ends, indices, side="right")]
        return found

    def first_index(self, position: int) -> int:
        """The index of the first row that stands at this position."""
        return self._index(position, is_end=False)

    def index_after(self, position: int) -> int:
        """The index behind the last row that stands at this position."""
        return self._index(position, is_end=True)

    def _index(self, position: int, *, is_end: bool) -> int:
        n_behind = 0
        for span in self._spans:
            if position < span.first:
                break
            if position < span.last:
                return span.end if is_end else span.start
            n_behind = span.end - span.last
        return position + n_behind + is_end
