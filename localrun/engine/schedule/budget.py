"""How many prompt rows a step may carry, what rows cost, and how long a request will therefore wait. Pure; time is an
argument.

Of the batch sizes that are fast enough for the streams, the largest one that is about as efficient as any is chosen, by
what was learned so far. Rows beside the streams and batches in the background (`background.py`) have separate
models, because kernels treat a few rows of many prompts differently from many rows of one. A model may be wrong where
it has no data, so rows beside the streams at most double from step to step.

Does not: divide the rows among prompts (`policy.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from localrun.engine.request import Request
from localrun.engine.sample.text import MediaSpan
from localrun.engine.schedule.policy import LANE_RANKS

# Kernels work on tiles of this many rows (`GGML_FA_TILE_Q` of llama.cpp, and powers of two of it elsewhere).
TILE_ROWS = 64
# Of a batch where any takes longer than it may: fewer rows read all weights for little work.
DEEP_ROWS = 4 * TILE_ROWS
# Less than a tile, for targets that a tile would miss. On any machine, prompts progress by at least the smallest.
SMALL_ROWS = (16, 32, 48)
# Where even these take too long, because their prompt is already deep.
FEW_ROWS = (8, 4, 2, 1)
# Before so many batches were seen, the guess is worthless.
_WARM_UP = 4
_FORGETTING = 0.98
_GROWTH = 1.01  # of what is known of the shortest step, in each step: the machine may have become slower
_LATEST = 0.2  # weight of the latest measurement in an average or a factor
_DEPTH_UNIT = 1024
_PRIOR_VARIANCE = 1e3
_LEAST_S = 1e-6
_LEAST_WEIGHTS = np.array([-np.inf, 0.0, 0.0, 0.0])


@cache
def tile_waste(n_rows: int, n_heads: int, n_threads: int) -> float:
    """How many times as much attention a processor computes for a batch of one prompt as its rows need.

    llama.cpp's flash attention (`ggml_compute_forward_flash_attn_ext_f16` of its CPU backend) divides the rows of all
    heads into four chunks for each thread, and takes each head's part of a chunk in tiles, the last of which it fills
    up: for 256 rows with 9 heads and 2 threads 1.11 times as much is computed, with 8 heads and 6 threads 1.72 times,
    and for 384 rows with these no more than is needed. 0 heads: there are no tiles.
    """
    if n_rows < TILE_ROWS or not n_heads:
        return 1.0  # one by one
    n_all = n_rows * n_heads
    n_chunks = -(-n_all // -(-n_all // (4 * n_threads))) if n_threads > 1 else 1
    chunk_rows = -(-n_all // max(n_chunks, n_threads))
    n_tiles = 0
    for begin in range(0, n_all, chunk_rows):
        at, end = begin, min(begin + chunk_rows, n_all)
        while at < end:
            n_tiles += 1
            at += min(TILE_ROWS, end - at, n_rows - at % n_rows)
    return n_tiles * TILE_ROWS / n_all


class CostModel:
    """How long prompt rows take to compute, learned at run time.

    The time of a batch is modelled as a + b * rows + c * rows * depth, where depth is how far into their prompts the
    rows begin: attention costs more the longer the prompt before the rows is, and `waste(rows)` times as much as its
    rows need (`tile_waste`). A batch whose adapters are not those of
    the batch before it `switches`, which costs s more. The four coefficients are learned online
    by recursive least squares, because they depend on this machine, this model and this moment. Forgetting is
    directional (Kulhavy, "Restricted exponential forgetting in real-time identification", Automatica 23, 1987): a batch
    replaces only what is known about batches like it. With plain forgetting, an hour of short prompts would erase what
    depth costs, and the next long prompt would get an arbitrary number of rows.

    A straight line is not exact: kernels work on tiles, and how well 128 or 192 rows fill the threads depends on the
    number of heads. So each size that suits tiles also has its own learned factor on top of the line.

    Learns from `observe`, answers `predict_s` once `is_warm`."""

    def __init__(self, waste: Callable[[int], float] = lambda _n_rows: 1.0) -> None:
        self.waste = waste
        self._weights = np.zeros(4)
        self._covariance = np.eye(4) * _PRIOR_VARIANCE
        self._factors: dict[int, float] = {}
        self._n_seen = 0
        self._deepest = 0.0

    @property
    def is_warm(self) -> bool:
        return self._n_seen >= _WARM_UP

    def has_seen(self, depth: float) -> bool:
        """Whether a prompt of about this depth was seen."""
        return depth <= 2 * self._deepest + _DEPTH_UNIT

    def knows(self, depth: float) -> bool:
        """Whether a prediction at this depth is worth something."""
        return self.is_warm and self.has_seen(depth)

    @property
    def switch_s(self) -> float:
        """Seconds that a change of adapters is expected to cost."""
        return float(self._line()[3])

    def predict_s(self, n_rows: int, depth: float) -> float:
        """Seconds that `n_rows` from `depth` on are expected to take, without a switch; always positive."""
        return max(_LEAST_S, float(self._features(n_rows, depth) @ self._line())) * self._factors.get(n_rows, 1.0)

    def efficiency(self, n_rows: int, depth: float) -> float:
        """The share of a batch's time that its rows would cost in any batch; the rest is the overhead of this batch
        size. Rows per second would not compare sizes fairly, because a larger batch reaches deeper."""
        features = self._features(n_rows, depth)
        features[2] /= self.waste(n_rows)
        return max(_LEAST_S, float(features[1:] @ self._line()[1:])) / self.predict_s(n_rows, depth)

    def observe(self, n_rows: int, depth: float, seconds: float, *, switches: bool = False) -> None:
        """`n_rows` rows from `depth` on took `seconds`."""
        features = self._features(n_rows, depth, switches)
        guess_s = float(features @ self._weights)
        direction = self._covariance @ features
        spread = float(features @ direction)
        self._weights = self._weights + direction * ((seconds - guess_s) / (1 + spread))
        shrink = (_FORGETTING - (1 - _FORGETTING) / spread) / (_FORGETTING * (1 + spread))
        self._covariance = self._covariance - shrink * np.outer(direction, direction)
        if self.is_warm and (n_rows in SMALL_ROWS or n_rows % TILE_ROWS == 0):
            ratio = min(2.0, max(0.5, seconds / max(_LEAST_S, float(features @ self._line()))))
            factor = self._factors.get(n_rows, 1.0)
            self._factors[n_rows] = factor + _LATEST * (ratio - factor)
        self._n_seen += 1
        self._deepest = max(self._deepest, depth)

    def recompute_s(self, start: int, n_tokens: int, *, n_rows: int) -> float:
        """Seconds that computing `n_tokens` from position `start` on would take, `n_rows` at a time."""
        if not self.is_warm:
            return n_tokens * 1e-3
        return n_tokens / n_rows * self.predict_s(n_rows, start + n_tokens / 2)

    def _features(self, n_rows: int, depth: float, switches: bool = False) -> NDArray[np.float64]:
        """All of the order of 1; otherwise the squares would be badly conditioned."""
        tiles = n_rows / TILE_ROWS
        attention = tiles * self.waste(n_rows) * (depth + n_rows / 2) / _DEPTH_UNIT
        return np.array([1.0, tiles, attention, float(switches)])

    def _line(self) -> NDArray[np.float64]:
        """The coefficients. More rows, or deeper ones, never take less time. If all batches so far had one size, noise
        could say otherwise, and a larger batch would seem to cost nothing."""
        line: NDArray[np.float64] = np.maximum(self._weights, _LEAST_WEIGHTS)
        return line


def sizes(limit: int) -> list[int]:
    """Numbers of rows up to `limit` that suit the kernels; `limit` itself if it is less than all of them."""
    fitting = [*SMALL_ROWS, *range(TILE_ROWS, limit + 1, TILE_ROWS)]
    return [n_rows for n_rows in fitting if n_rows <= limit] or [limit]


# Sizes within this share of the best efficiency count as equally good. Beside streams the largest of them is taken. In
# a step of prompts alone the smallest is taken, because then the first prompts are done sooner.
_AS_GOOD = 0.95
_NEARLY = 0.9
# A step with prompt rows may take this many times as long as one without, even if that misses the target. Otherwise a
# target below the machine's own decode time would starve prompts for nothing.
_SLOWDOWN = 2.0


class Budget:
    """Learns from `observe`, answers `prefill_rows`, `rows_until`, `direct_tokens` and `recompute_s`.

    `mixes_rows`: prompt rows and streams' rows are computed together, and share `batch_rows`. `decode_s` is what a step
    of streams alone takes lately, 0 before the first.
    """

    def __init__(self, *, batch_rows: int, mixes_rows: bool) -> None:
        self.batch_rows = batch_rows
        self.mixes_rows = mixes_rows
        self._beside = CostModel()
        self._last_rows = 0
        self.decode_s = 0.0
        self._shortest_s = math.inf  # of the steps that switched to other adapters, or somewhat longer

    @property
    def switch_s(self) -> float:
        """Seconds by which a step is longer whose adapters are not those of the step before it; no more than the whole
        of any such step takes."""
        return min(self._beside.switch_s, self._shortest_s)

    def observe(self, *, n_decode: int, n_prefill: int, depth: float, step_s: float, switches: bool = False) -> None:
        """A step with these decode and prompt rows took `step_s` seconds; its prompt rows began `depth` tokens deep. It
        `switches` to other adapters."""
        if switches:
            self._shortest_s = min(step_s, self._shortest_s * _GROWTH)
        if n_prefill == 0:
            plain_s = max(0.0, step_s - self.switch_s) if switches else step_s
            self.decode_s += _LATEST * (plain_s - self.decode_s) if self.decode_s else plain_s
            return
        prompts_s = max(0.0, step_s - (self.decode_s if n_decode else 0.0))
        self._beside.observe(n_prefill, depth, prompts_s, switches=switches)
        self._last_rows = n_prefill

    def recompute_s(self, start: int, n_tokens: int) -> float:
        """Seconds that computing `n_tokens` from position `start` on would take, in full batches."""
        return self._beside.recompute_s(start, n_tokens, n_rows=self.batch_rows)

    def prefill_rows(self, *, n_decode: int, depth: float, target_s: float) -> int:
        """Prompt rows that may join `n_decode` running streams, which want a token every `target_s` seconds (0: no
        limit). Without streams, the number that finishes the first prompts soonest."""
        limit = self.batch_rows - (n_decode if self.mixes_rows else 0)
        if target_s == 0 and (n_decode or not self._beside.is_warm):
            return limit
        if not self._beside.is_warm:
            return min(limit, TILE_ROWS)
        if n_decode == 0:
            return min(_efficient(self._beside, sizes(limit), depth, _NEARLY))
        allowed_s = max(target_s - self.decode_s, (_SLOWDOWN - 1) * self.decode_s)
        return best_size(self._beside, min(limit, max(TILE_ROWS, 2 * self._last_rows)), depth, allowed_s)

    def rows_until(self, *, depth: float, left_s: float) -> int:
        """Prompt rows of one step before the streams' turn, which is in `left_s` seconds; 0 if there is no time for
        any. There may be time for several such steps."""
        if not self._beside.knows(depth):
            return min(self.batch_rows, untried_rows(depth)) if left_s > 0 else 0
        limit = min(self.batch_rows, max(TILE_ROWS, 2 * self._last_rows))
        quick = [n_rows for n_rows in sizes(limit) if self._beside.predict_s(n_rows, depth) <= left_s]
        if quick:
            return min(_efficient(self._beside, quick, depth, _NEARLY))
        few = [n_rows for n_rows in FEW_ROWS if n_rows >= self.least_rows(depth)]
        return next((n_rows for n_rows in few if self._beside.predict_s(n_rows, depth) <= left_s), 0)

    def least_rows(self, depth: float) -> int:
        """Prompt rows of one turn, however long they take, since prompts would otherwise never finish: as many as take
        at most twice as long as a single row. That is many where reading the weights dominates, and few deep in a
        prompt."""
        if not self._beside.knows(depth):
            return min(SMALL_ROWS[0], untried_rows(depth))
        allowed_s = 2 * self._beside.predict_s(1, depth)
        among = (SMALL_ROWS[0], *FEW_ROWS)
        return next(n_rows for n_rows in among if n_rows == 1 or self._beside.predict_s(n_rows, depth) <= allowed_s)

    def is_better_whole(self, n_rows: int, *, part_rows: int, depth: float, left_s: float) -> bool:
        """Whether all of a short prompt's rows may be computed at once although there is only time for `part_rows`. A
        pass for each part costs more in all, but streams wait for the whole."""
        if not self._beside.knows(depth):
            return n_rows <= untried_rows(depth)
        return self._beside.predict_s(n_rows, depth) <= max(left_s, 2 * self._beside.predict_s(part_rows, depth))

    def direct_tokens(self, target_s: float, depth: int = 0) -> int:
        """How many tokens of a prompt, from `depth` on, may be computed in the main context, where streams cannot
        interrupt them: a tile at most, and no more than fits the streams' target. On a slow machine that is 1, the
        token whose logits are needed."""
        if target_s == 0:
            return TILE_ROWS
        if not self._beside.knows(depth):
            return untried_rows(depth)
        descending = reversed(sizes(TILE_ROWS))  # it is asked for each request that waits
        return next((n_rows for n_rows in descending if self._beside.predict_s(n_rows, depth) <= target_s), 1)


def untried_rows(depth: float) -> int:
    """Rows to begin with if nothing is known: a tile at the beginning of a prompt, fewer later."""
    return max(1, int(TILE_ROWS * _DEPTH_UNIT / (_DEPTH_UNIT + depth)))


def best_size(model: CostModel, limit: int, depth: float, allowed_s: float) -> int:
    """The largest size up to `limit` that is fast enough and about as efficient as any of those."""
    fitting = sizes(limit)
    quick = [n_rows for n_rows in fitting if model.predict_s(n_rows, depth) <= allowed_s]
    return max(_efficient(model, quick, depth, _AS_GOOD)) if quick else min(fitting)


def deep_size(model: CostModel, limit: int, *, is_alone: bool) -> int:
    """The size for where no size is fast enough and the fewest rows would waste too much: that with the least waste of
    `DEEP_ROWS` and less, or for prompts that nobody runs beside of `DEEP_ROWS` and more."""
    among = [
        n_rows for n_rows in sizes(limit) if (n_rows >= DEEP_ROWS if is_alone else TILE_ROWS < n_rows <= DEEP_ROWS)
    ]
    least = min(map(model.waste, among), default=1.0) / _AS_GOOD
    good = [n_rows for n_rows in among if model.waste(n_rows) <= least] or [limit]
    return min(good) if is_alone else max(good)


def _efficient(model: CostModel, among: list[int], depth: float, part: float) -> list[int]:
    """The sizes whose efficiency is at least `part` of the best one's."""
    efficiencies = {n_rows: model.efficiency(n_rows, depth) for n_rows in among}
    least = part * max(efficiencies.values())
    return [n_rows for n_rows, efficiency in efficiencies.items() if efficiency >= least]


# The weight that earlier steps, or answers, keep after each new one.
_STEP_DECAY = 0.98
_ANSWER_DECAY = 0.9
# Assumed tokens per answer before any was seen; this counts as one answer.
_PRIOR_OUTPUT = 128
_LEAST_HAZARD = 1e-9


class Waits:
    """How long a request will wait for its first token. Learns from `observe_*`; answers `first_tokens_s`. `is_encoded`
    says whether the rows of a chunk are kept.

    Four rates are learned, with more weight for newer steps: prompt rows per second in steps that had some, seconds per
    token of a stream, how often an answer ends at a token, and seconds per row of an encoded picture or recording. With
    them the queue is simulated: slots become free when the running answers are expected to end, waiting requests take
    them in order, and prompts are encoded and computed one after another at the machine's one rate. A lane that may
    preempt takes its slot at once.

    Every token is assumed to end an answer with the same probability h, so the length of an answer so far says nothing
    about the rest: (1 - exp(-h * n)) / h tokens of the n that its limit leaves. Answers that reached their limit count
    with their tokens but without an end. That makes h the maximum-likelihood estimate for an exponential distribution
    of lengths that the limits cut off.

    Does not: know the prefix cache (it learns the share of prompts that came from it instead), or expect cancels. The
    work of a preempted request that comes back is not counted as a delay for others. A prediction is an estimate, not a
    promise."""

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
