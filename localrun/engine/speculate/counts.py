"""How many tokens were drafted, by what, and what became of them.

Pure. Of one request, or of all of an engine's.
"""

from __future__ import annotations

from localrun.wire import DraftCounts, DraftSource


class DraftTotals:
    """What was drafted of each source, and what became of it. All of it counts in the `total`, too."""

    def __init__(self, total: DraftTotals | None = None) -> None:
        self._total = total
        self.n_drafted = self.n_accepted = 0
        self.n_saved = 0.0  # steps, of a request: one without drafts would have given a token
        self._counts: dict[DraftSource, list[float]] = {}

    def add(self, source: DraftSource, *, n_drafted: int = 0, n_accepted: int = 0, seconds: float = 0.0) -> None:
        """A draft; without tokens only the time that it took."""
        counts = self._counts.setdefault(source, [0, 0, 0, 0.0])
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        counts[0] += n_drafted > 0
        counts[1] += n_drafted
        counts[2] += n_accepted
        counts[3] += seconds
        if self._total is not None:
            self._total.add(source, n_drafted=n_drafted, n_accepted=n_accepted, seconds=seconds)

    def by_source(self) -> tuple[DraftCounts, ...]:
        """For messages."""
        return tuple(
            DraftCounts(source, int(n), int(n_drafted), int(n_accepted), seconds)
            for source, (n, n_drafted, n_accepted, seconds) in self._counts.items()
        )

    def speedup(self, n_output: int) -> float:
        """How many times as fast an answer of so many tokens was as without drafts: a step without any counts as what a
        token costs."""
        return n_output / max(1.0, n_output - self.n_saved) if n_output else 1.0
