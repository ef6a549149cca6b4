"""How many tokens each stream of a split KV cache holds. Pure counting: a stream belongs to one sequence.

Invariant: no stream holds more than `n_cells`.
Does not: know where in a stream a token lies; nothing depends on it.
"""

from __future__ import annotations


class StreamCells:
    """`n_seqs` streams for requests and `n_away` more for prompts in the making, of `n_cells` cells each, all
    empty at first."""

    n_shared = 0

    def __init__(self, n_cells: int, n_seqs: int, n_away: int) -> None:
        self.n_cells = n_cells
        self._n_seqs = n_seqs
        self._lengths = [0] * (n_seqs + n_away)

    @property
    def n_used(self) -> int:
        """Cells in use in all streams."""
        return sum(self._lengths)

    @property
    def n_free(self) -> int:
        """Cells that are free in the fullest of the requests' streams: all of them can have as many."""
        return self.n_cells - self.span

    @property
    def span(self) -> int:
        """The longest of the requests' streams: they are computed together, each as long as the longest."""
        return max(self._lengths[: self._n_seqs])

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return self._lengths[seq]

    def place(self, rows: list[int]) -> None:
        """Append one token to the sequence of each row."""
        for seq in rows:
            self._lengths[seq] += 1

    def set(self, seq: int, n_tokens: int) -> None:
        """A sequence holds so many tokens now."""
        self._lengths[seq] = n_tokens
