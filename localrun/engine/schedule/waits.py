"""How long a request will wait for its first token. Pure; time is an argument.

Four rates are learned, with more weight for newer steps: prompt rows per second in steps that had some, seconds per
token of a stream, how often an answer ends at a token, and seconds per row of an encoded picture or recording. With
them the queue is simulated: slots become free when the running answers are expected to end, waiting requests take them
in order, and prompts are encoded and computed one after another at the machine's one rate. A lane that may preempt
takes its slot at once.

Every token is assumed to end an answer with the same probability h, so the length of an answer so far says nothing
about the rest: (1 - exp(-h * n)) / h tokens of the n that its limit leaves. Answers that reached their limit count with
their tokens but without an end. That makes h the maximum-likelihood estimate for an exponential distribution of lengths
that the limits cut off.

Does not: know the prefix cache (it learns the share of prompts that came from it instead), or expect cancels. The work
of a preempted request that comes back is not counted as a delay for others. A prediction is an estimate, not a promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from localrun.engine.request import MediaSpan, Request
from localrun.engine.schedule.policy import LANE_RANKS

# The weight that earlier steps, or answers, keep after each new one.
_STEP_DECAY = 0.98
_ANSWER_DECAY = 0.9
# Assumed tokens per answer before any was seen; this counts as one answer.
_PRIOR_OUTPUT = 128
_LEAST_HAZARD = 1e-9


class Waits:
    """Learns from `observe_*`; answers `first_tokens_s`. `is_encoded` says whether the rows of a chunk are kept."""

    def __init__(self) -> None:
        self.is_encoded: Callable[[MediaSpan], bool] = lambda _placed: False
        self._encode = _Mean()
        self._prefill = _Mean()
        self._itl = _Mean()
        self._uncached = _Mean()
        self._hazard = _Mean()
        self.observe_end(n_output=_PRIOR_OUTPUT, is_cut=False)

    def observe_step(self, *, n_prefill: int, n_decode: int, step_s: float) -> None:
        """A step with these prompt and decode rows took `step_s` seconds."""
        if n_prefill:
            # Weighted by rows: the last rows of cached prompts say little about how long a whole prompt takes.
            self._prefill.add(n_prefill * n_prefill, n_prefill * step_s, decay=_STEP_DECAY)
        if n_decode:
            self._itl.add(step_s, 1.0, decay=_STEP_DECAY)

    def observe_encoding(self, n_rows: int, seconds: float) -> None:
        """A chunk of so many rows was encoded. Until one was, encoding is expected to take no time."""
        self._encode.add(seconds, n_rows, decay=_ANSWER_DECAY)

    def observe_start(self, *, n_tokens: int, n_cached: int) -> None:
        """A request of `n_tokens` got `n_cached` of them from the cache."""
        self._uncached.add(n_tokens - n_cached, n_tokens, decay=_ANSWER_DECAY)

    def observe_end(self, *, n_output: int, is_cut: bool) -> None:
        """An answer ended, at its limit (`is_cut`) or in another way. What counts is how long it kept its slot."""
        self._hazard.add(0.0 if is_cut else 1.0, n_output, decay=_ANSWER_DECAY)

    def first_tokens_s(
        self, running: Sequence[Request], waiting: Sequence[Request], *, n_free_slots: int, known_rows: dict[int, int]
    ) -> list[float] | None:
        """Seconds until the first token (after a preemption, the next one) of each of `waiting`, which are in order.
        `known_rows` maps request ids to the rows to compute, if known. None before any prompt was computed.
        """
        rows_per_s, itl_s = self._prefill.value, self._itl.value or 0.0
        if not rows_per_s:
            return None
        uncached = 1.0 if self._uncached.value is None else self._uncached.value
        counted: set[bytes] = set()
        prefilling = [request for request in running if request.is_prefilling]
        prefill_free_s = sum(request.n_pending for request in prefilling) / rows_per_s
        prefill_free_s += sum(self._encoding_s(request, request.n_computed, counted) for request in prefilling)
        ends = [(prefill_free_s if request.is_prefilling else 0.0) + self._rest(request) * itl_s for request in running]
        below = sorted((request.rank, end_s) for request, end_s in zip(running, ends, strict=True))
        slots = [0.0] * n_free_slots + ends
        heapify(slots)
        result: list[float] = []
        for request in waiting:
            if slots[0] > 0 and below and below[-1][0] > LANE_RANKS[request.lane]:
                end_s = below.pop()[1]
                if end_s in slots:  # otherwise an earlier request took it when it became free
                    slots.remove(end_s)
                    heapify(slots)
                start_s = 0.0
            else:
                start_s = heappop(slots)
            n_rows = known_rows.get(request.id, request.n_tokens * uncached)
            encoding_s = self._encoding_s(request, request.n_tokens - n_rows, counted)
            prefill_free_s = max(prefill_free_s, start_s) + encoding_s + n_rows / rows_per_s
            heappush(slots, prefill_free_s + self._rest(request) * itl_s)
            result.append(prefill_free_s)
        return result

    def _encoding_s(self, request: Request, n_known: float, counted: set[bytes]) -> float:
        """Of the chunks behind the first `n_known` tokens whose rows nobody has; `counted` are others' before it."""
        missing = {
            span.key: span.chunk.n_tokens
            for span in request.chunks
            if span.end > n_known and span.key not in counted and not self.is_encoded(span)
        }
        counted.update(missing)
        return sum(missing.values()) * (self._encode.value or 0.0)

    def _rest(self, request: Request) -> float:
        """Tokens that an answer is expected to have left."""
        n_left, hazard = request.n_left, self._hazard.value or 0.0
        return -math.expm1(-hazard * n_left) / hazard if hazard > _LEAST_HAZARD else n_left


class _Mean:
    """A ratio of two exponentially decaying sums."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._per = 0.0

    def add(self, amount: float, per: float, *, decay: float) -> None:
        self._amount = decay * self._amount + amount
        self._per = decay * self._per + per

    @property
    def value(self) -> float | None:
        return self._amount / self._per if self._per > 0 else None
