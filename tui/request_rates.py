"""How fast each request has been lately, as a row of block glyphs. Pure.

Fed with every snapshot; one sample a second is kept for each request that the snapshot has, and forgotten with it.

Does not: compute rates; they are the snapshot's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from localrun.snapshot import Snapshot

KEPT_S = 60
_SAMPLE_EVERY_S = 1.0
_GLYPHS = "▁▂▃▄▅▆▇█"


class RequestRates:
    """Samples of tokens per second by request id, oldest first."""

    def __init__(self) -> None:
        self._rates: dict[str, deque[float]] = {}
        self._due_s = 0.0

    def add(self, snapshot: Snapshot) -> None:
        """Takes a sample of each request that decodes, if one is due."""
        if self._due_s - _SAMPLE_EVERY_S <= snapshot.time_s < self._due_s:
            return
        self._due_s = snapshot.time_s + _SAMPLE_EVERY_S
        alive = {row.id for row in snapshot.requests}
        self._rates = {key: rates for key, rates in self._rates.items() if key in alive}
        for row in snapshot.requests:
            if row.tokens_per_s is not None and not row.state.is_final:
                self._rates.setdefault(row.id, deque(maxlen=KEPT_S)).append(row.tokens_per_s)

    def of(self, request_id: str) -> Sequence[float]:
        """The samples of one request; none before its second token."""
        return tuple(self._rates.get(request_id, ()))

    def top(self) -> float:
        """The highest rate of any request: what all sparklines are drawn against."""
        return max((max(rates) for rates in self._rates.values() if rates), default=0.0)


def sparkline(values: Sequence[float], width: int, top: float) -> str:
    """The last `width` values as glyphs; the lowest one stands for anything down to 0."""
    if top <= 0:
        return ""
    highest = len(_GLYPHS) - 1
    return "".join(_GLYPHS[min(highest, int(value / top * len(_GLYPHS)))] for value in values[-width:])
