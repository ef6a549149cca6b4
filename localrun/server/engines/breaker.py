"""When a model's engine may be started again after it died.

Owner: the supervisor, one per model file; pure, time is an argument.

An engine that dies while loading, or within `EARLY_S` after it, has most likely met something that the next one will
meet as well: a file that makes llama.cpp abort, or memory that is not there. Two such deaths in a row delay the next
start, three stop starting for `OPEN_S`; then one attempt is let through, and its early death closes the door again.
An engine that lived longer than `EARLY_S` clears the count: its end is an accident, and the next start is immediate.

Does not: sleep, start anything, or know why an engine died.
"""

from __future__ import annotations

from localrun.errors import LocalrunError

EARLY_S = 60.0
OPEN_S = 30.0
DEATHS_TO_OPEN = 3
FIRST_DELAY_S = 0.5


class Breaker:
    """Counts early deaths of one model's engines."""

    def __init__(self) -> None:
        self.n_early_deaths = 0
        self.last_error: LocalrunError | None = None
        self._last_death_s = 0.0

    def died(self, now_s: float, lived_s: float, error: LocalrunError) -> None:
        """An engine ended by itself or failed to load, `lived_s` after its load (0 when it never became ready)."""
        self.n_early_deaths = self.n_early_deaths + 1 if lived_s < EARLY_S else 0
        self.last_error = error
        self._last_death_s = now_s

    def closed_for_s(self, now_s: float) -> float:
        """Seconds for which starting is refused; 0 when a start may be tried."""
        if self.n_early_deaths < DEATHS_TO_OPEN:
            return 0.0
        return max(0.0, self._last_death_s + OPEN_S - now_s)

    def delay_s(self, now_s: float) -> float:
        """Seconds to wait before the next start: none after one death, then doubling from `FIRST_DELAY_S`."""
        if not 2 <= self.n_early_deaths < DEATHS_TO_OPEN:
            return 0.0
        backoff_s: float = FIRST_DELAY_S * 2 ** (self.n_early_deaths - 2)
        return max(0.0, self._last_death_s + backoff_s - now_s)
