"""The long prompts that are computed in the background, and when streams may interrupt them.

Owner: the engine's main thread. One batch at a time is under way (`Backend.staging_start`). Streams go on beside it,
once per latency target: a step of theirs makes the background pause, so it costs the prompts what it takes and nothing
else. The background always gets at least as long as a step takes, or a target below that would starve it.

Invariant: while a batch is under way, its requests stay where they are; whoever wants to change that calls `abandon`
for one of them, or `drop`.
Does not: choose rows (`scheduler.py`), or move finished prompts (`engine.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from localrun.engine.backend import Backend
from localrun.engine.request import Request
from localrun.engine.schedule.scheduler import Grant, fill_batch

# Waiting for the background ends this soon, so that newcomers and cancels are not kept waiting.
POLL_S = 0.02
# Copying a long prompt's state to the streams' side takes about as long.
FINISH_S = 0.025


class Abandoned(NamedTuple):
    """What a request left behind: a sequence that the batch under way makes hold `tokens`; it had `n_computed`."""

    seq: int
    tokens: list[int]
    n_computed: int


class Staging:
    """See the module. `grants` are the parts of a batch that somebody waits for, `depth` is where in their prompts its
    rows begin, on average over the rows."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self.grants: tuple[Grant, ...] = ()
        self.depth = 0.0
        self._abandoned: list[Abandoned] = []
        self._backend = backend
        self._clock = clock
        self._rows: list[int] = []
        self._started_at_s = 0.0
        self._interrupted_s = 0.0
        self._last_step_end_s = -math.inf
        self._last_step_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a batch is under way."""
        return self._backend.is_staging

    @property
    def n_rows(self) -> int:
        return len(self._rows)

    @property
    def completes_prompt(self) -> bool:
        """Whether finishing the batch takes a copy: that of a prompt that is done then but for its last token."""
        return any(request.n_pending == n_tokens + 1 for request, n_tokens in self.grants)

    def start(self, grants: Sequence[Grant]) -> None:
        """Begin a batch."""
        self.grants = tuple(grants)
        self._rows = fill_batch(self._backend.staging_batch, grants, wants_logits=False)
        self.depth = sum(request.n_computed * n_tokens for request, n_tokens in grants) / max(1, self.n_rows)
        self._started_at_s, self._interrupted_s = self._clock(), 0.0
        self._backend.staging_start(self.n_rows)

    def is_over(self) -> bool:
        """Whether a batch is under way and was computed."""
        return self.is_busy and self._backend.staging_wait(0.0)

    def finish(self) -> tuple[list[int], float]:
        """End a batch that is over. Returns the sequence of each row, and the seconds that computing them took, without
        interruptions. Raises NoRoom or DecodeFailed."""
        self._backend.staging_finish()
        return self._rows, self._clock() - self._started_at_s - self._interrupted_s

    def drop(self) -> list[Request]:
        """Give up what is under way. Returns its requests: how much of them was computed, nobody knows."""
        if not self.is_busy:
            return []
        self._backend.staging_abort()
        return [grant.request for grant in self.grants]

    def abandon(self, request: Request) -> bool:
        """Let the batch under way go on without anybody who waits for this request; its sequence must not be touched
        until then (`take_abandoned`). False, and nothing has changed, if there is no batch that others wait for."""
        others = tuple(grant for grant in self.grants if grant.request is not request)
        if not self.is_busy or not others:
            return False
        n_computed = request.n_computed
        n_staged = sum(grant.n_tokens for grant in self.grants if grant.request is request)
        assert request.seq is not None
        self._abandoned.append(Abandoned(request.seq, request.tokens[: n_computed + n_staged], n_computed))
        self.grants = others
        return True

    def take_abandoned(self) -> list[Abandoned]:
        """What may be touched again, now that the batch is over."""
        taken, self._abandoned = self._abandoned, []
        return taken

    def wait_for_turn(self, target_s: float | None) -> bool:
        """Whether streams that want a token every `target_s` may have a step now; if not, some time went by waiting
        for that. 0: they are in no hurry, and wait for the batch. None: there are only prompts, which take turns with
        it. A batch that is over and was left lying (`is_turn_near`) makes it their turn."""
        if not self.is_busy or self.is_over():
            return True
        left_s = self.left_s(target_s)
        if left_s <= 0:
            return True
        self.wait(left_s)
        return False

    def is_turn_near(self, target_s: float | None) -> bool:
        """Whether streams have a step so soon that finishing a batch, with its copies, would make them late."""
        return target_s is not None and target_s > 0 and self.left_s(target_s) < FINISH_S

    def wait(self, timeout_s: float = POLL_S) -> None:
        """Let the background compute."""
        self._backend.staging_wait(min(timeout_s, POLL_S))

    def left_s(self, target_s: float | None) -> float:
        """Seconds until the streams' turn."""
        wait_s = math.inf if target_s == 0 else max((target_s or 0.0) - self._last_step_s, self._last_step_s)
        return self._last_step_end_s + wait_s - self._clock()

    def note_step(self, step_s: float, *, has_streams: bool) -> None:
        """A step took so long and ends now; streams were in it or not."""
        if has_streams:
            self._last_step_end_s, self._last_step_s = self._clock(), step_s
        if self.is_busy:
            self._interrupted_s += step_s
