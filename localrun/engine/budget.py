"""How many prompt rows a step may carry so that running streams keep their inter-token time. Pure.

The time of prompt rows is modelled as a + b * rows + c * rows * depth, where depth is how far into their prompts they
begin: attention costs more the more there is to look back at. The three coefficients are learned online by recursive
least squares, because they belong to this machine, this model and this moment. Forgetting is directional (Kulhavy,
"Restricted exponential forgetting in real-time identification", Automatica 23, 1987): a step replaces what is known
about steps like it and nothing else. With plain forgetting, an hour of short prompts would erase what depth costs, and
the next long one would get any number of rows.

A straight line is not the whole truth. Kernels work on tiles: attention on the CPU takes 64 rows in less time than 63,
and how well 128 or 192 fill the threads depends on the number of heads. So only sizes that suit tiles are considered,
each has a factor of its own on top of the model, learned the same way, and of those that are quick enough the one with
the most rows per second is taken. Because a model may be wrong where it was not tried, prompt rows at most double from
step to step.

Does not: divide the rows among prompts (`shares.py`).
"""

from __future__ import annotations

import numpy as np

# Kernels work on tiles of this many rows (`GGML_FA_TILE_Q` of llama.cpp, and powers of two of it elsewhere).
TILE_ROWS = 64
# Less than a tile, for targets that a tile would miss. Prompts always progress by the smallest, however slow the machine.
SMALL_ROWS = (16, 32, 48)
# A batch in the background takes about this long at most, so that a prompt that comes after it waits no longer; and so
# many latency targets, because the longer a batch takes, the longer its single operations, which nobody can interrupt.
STAGING_S = 1.0
STAGING_TARGETS = 8
# Of sizes that do nearly as many rows per second the smallest is taken where nobody waits for anything but prompts: then
# the first of them are done sooner.
_NEARLY = 0.9
# Until the model has seen this many steps with prompt rows its guess is worth nothing.
_WARM_UP_STEPS = 4
_FORGETTING = 0.98
# A step with prompt rows may take this many times a step without, even where that misses the target: a target below
# the machine's own decode time would otherwise starve prompts for nothing.
_SLOWDOWN = 2.0
_DEPTH_UNIT = 1024
_PRIOR_VARIANCE = 1e3
_LATEST = 0.2  # weight of the latest measurement in an average


class Budget:
    """Learns from `observe` and `observe_staging`, answers `prefill_rows`, `staging_rows` and `recompute_s`.

    `mixes_rows`: prompt rows and streams' rows are computed together, and share `batch_rows`. The background has
    `staging_rows` at once.
    """

    def __init__(self, *, batch_rows: int, mixes_rows: bool, staging_rows: int = 0) -> None:
        self._batch_rows = batch_rows
        self._staging_rows = staging_rows
        self._mixes_rows = mixes_rows
        self._weights = np.zeros(3)
        self._covariance = np.eye(3) * _PRIOR_VARIANCE
        self._factors: dict[int, float] = {}
        self._n_seen = 0
        self._last_rows = 0
        self._decode_s = 0.0

    def observe(self, *, n_decode: int, n_prefill: int, depth: float, step_s: float) -> None:
        """A step of so many decode rows and prompt rows took `step_s` seconds; the latter began `depth` tokens deep."""
        if n_prefill == 0:
            self._decode_s += _LATEST * (step_s - self._decode_s) if self._decode_s else step_s
        else:
            self._learn(n_prefill, depth, max(0.0, step_s - (self._decode_s if n_decode else 0.0)))

    def observe_staging(self, *, n_rows: int, depth: float, seconds: float) -> None:
        """A batch in the background took `seconds`, not counting interruptions."""
        self._learn(n_rows, depth, seconds)

    def predict_s(self, n_rows: int, depth: float) -> float:
        """Seconds that so many prompt rows are expected to take; never negative."""
        return max(1e-6, float(_features(n_rows, depth) @ self._weights)) * self._factors.get(n_rows, 1.0)

    def recompute_s(self, start: int, n_tokens: int) -> float:
        """Seconds that computing `n_tokens` from position `start` on would take, in full batches."""
        if self._n_seen < _WARM_UP_STEPS:
            return n_tokens * 1e-3
        n_batches = n_tokens / self._batch_rows
        return n_batches * self.predict_s(self._batch_rows, start + n_tokens / 2)

    def prefill_rows(self, *, n_decode: int, depth: float, target_s: float) -> int:
        """Prompt rows that may join `n_decode` running streams; the whole batch when there are none, or no limit
        (`target_s` 0)."""
        limit = self._batch_rows - (n_decode if self._mixes_rows else 0)
        if target_s == 0 or (n_decode == 0 and self._n_seen < _WARM_UP_STEPS):
            return limit
        if n_decode == 0:
            rates = {n_rows: n_rows / self.predict_s(n_rows, depth) for n_rows in _sizes(limit)}
            return min(n_rows for n_rows, rate in rates.items() if rate >= _NEARLY * max(rates.values()))
        if self._n_seen < _WARM_UP_STEPS:
            return min(limit, TILE_ROWS)
        allowed_s = max(target_s - self._decode_s, (_SLOWDOWN - 1) * self._decode_s)
        return self._best(min(limit, max(TILE_ROWS, 2 * self._last_rows)), depth, allowed_s)

    def staging_rows(self, *, depth: float, target_s: float | None) -> int:
        """Rows of the next batch in the background, beside streams with this target (0 or None: none in a hurry)."""
        if self._n_seen < _WARM_UP_STEPS:
            return min(self._staging_rows, 2 * TILE_ROWS)
        allowed_s = min(STAGING_S, STAGING_TARGETS * target_s) if target_s else STAGING_S
        return self._best(self._staging_rows, depth, allowed_s)

    def _best(self, limit: int, depth: float, allowed_s: float) -> int:
        """The size up to `limit` that does most rows per second of those that are quick enough."""
        seconds = {n_rows: self.predict_s(n_rows, depth) for n_rows in _sizes(limit)}
        quick = [(n_rows / took_s, n_rows) for n_rows, took_s in seconds.items() if took_s <= allowed_s]
        return max(quick)[1] if quick else min(seconds)

    def _learn(self, n_rows: int, depth: float, seconds: float) -> None:
        features = _features(n_rows, depth)
        guess_s = max(1e-6, float(features @ self._weights))
        direction = self._covariance @ features
        spread = float(features @ direction)
        self._weights = self._weights + direction * ((seconds - float(features @ self._weights)) / (1 + spread))
        shrink = (_FORGETTING - (1 - _FORGETTING) / spread) / (_FORGETTING * (1 + spread))
        self._covariance = self._covariance - shrink * np.outer(direction, direction)
        self._n_seen += 1
        self._last_rows = n_rows
        if self._n_seen > _WARM_UP_STEPS and (n_rows in SMALL_ROWS or n_rows % TILE_ROWS == 0):
            ratio = min(2.0, max(0.5, seconds / guess_s))
            factor = self._factors.get(n_rows, 1.0)
            self._factors[n_rows] = factor + _LATEST * (ratio - factor)


def _sizes(limit: int) -> list[int]:
    """Numbers of rows that suit the kernels, and `limit` where it is less than any."""
    sizes = [*SMALL_ROWS, *range(TILE_ROWS, limit + 1, TILE_ROWS)]
    return [n_rows for n_rows in sizes if n_rows <= limit] or [limit]


def _features(n_rows: int, depth: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """All of the order of 1, or the squares would be badly conditioned."""
    tiles = n_rows / TILE_ROWS
    return np.array([1.0, tiles, tiles * (depth + n_rows / 2) / _DEPTH_UNIT])
