"""How many prompt rows a step may carry so that running streams keep their inter-token time. Pure.

The time of a step is modelled as a + b * rows + c * rows * span, where span is the used length of the KV pool that
every row attends over. The three coefficients are learned online by recursive least squares, because they belong to
this machine, this model and this moment. Forgetting is directional (Kulhavy, "Restricted exponential forgetting in
real-time identification", Automatica 23, 1987): a step replaces what is known about steps like it and nothing else.
With plain forgetting, an hour of streams alone would erase what a prompt row costs, and the next prompt would get any
number of them. And because a model may be wrong where it was not tried, prompt rows at most double from step to step.

Does not: divide the rows among prompts (`scheduler.py` does).
"""

from __future__ import annotations

import numpy as np

# Kernels work on tiles of rows: 64 rows took less time than 63 on the CPU backend, so a budget is cut to whole tiles.
TILE_ROWS = 64
# Prompts always progress, however slow the machine; below this a step is mostly overhead.
FLOOR_ROWS = 16
# Until the model has seen this many steps its guess is worth nothing.
_WARM_UP_STEPS = 12
_FORGETTING = 0.99
# A step with prompt rows may take this many times a step without, even where that misses the target: a target below
# the machine's own decode time would otherwise starve prompts for nothing.
_SLOWDOWN = 2.0
_SPAN_UNIT = 1024
_PRIOR_VARIANCE = 1e3


class Budget:
    """Learns from `observe`, answers `prefill_rows`. `target_itl_s` 0 means no limit."""

    def __init__(self, *, target_itl_s: float, batch_rows: int) -> None:
        self.target_itl_s = target_itl_s
        self._batch_rows = batch_rows
        self._weights = np.zeros(3)
        self._covariance = np.eye(3) * _PRIOR_VARIANCE
        self._n_seen = 0
        self._last_prefill_rows = 0

    def observe(self, *, n_decode: int, n_prefill: int, span: int, step_s: float) -> None:
        """A step of so many decode rows and prompt rows took `step_s` seconds."""
        features = _features(n_decode + n_prefill, span)
        direction = self._covariance @ features
        spread = float(features @ direction)
        error_s = step_s - float(features @ self._weights)
        self._weights = self._weights + direction * (error_s / (1 + spread))
        shrink = (_FORGETTING - (1 - _FORGETTING) / spread) / (_FORGETTING * (1 + spread))
        self._covariance = self._covariance - shrink * np.outer(direction, direction)
        self._n_seen += 1
        self._last_prefill_rows = n_prefill

    def predict_s(self, n_rows: int, span: int) -> float:
        """Seconds that a step of `n_rows` is expected to take; never negative."""
        return max(0.0, float(_features(n_rows, span) @ self._weights))

    def prefill_rows(self, *, n_decode: int, span: int) -> int:
        """Prompt rows that may join `n_decode` running streams; the whole batch when there are none."""
        limit = self._batch_rows - n_decode
        if n_decode == 0 or self.target_itl_s == 0:
            return limit
        if self._n_seen < _WARM_UP_STEPS:
            return min(limit, TILE_ROWS)
        alone_s = self.predict_s(n_decode, span)
        allowed_s = max(self.target_itl_s, _SLOWDOWN * alone_s)
        per_row_s = max(1e-7, float(self._weights[1] + self._weights[2] * span / _SPAN_UNIT) / TILE_ROWS)
        rows = min(int((allowed_s - alone_s) / per_row_s), max(TILE_ROWS, 2 * self._last_prefill_rows))
        rows -= rows % TILE_ROWS if rows >= TILE_ROWS else rows % FLOOR_ROWS
        return min(limit, max(rows, FLOOR_ROWS))


def _features(n_rows: int, span: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """All of the order of 1, or the squares would be badly conditioned."""
    tiles = n_rows / TILE_ROWS
    return np.array([1.0, tiles, tiles * span / _SPAN_UNIT])
