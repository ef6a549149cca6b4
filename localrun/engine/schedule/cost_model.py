"""What computing rows of prompts takes, learned while it is done. Pure.

The time of a batch is modelled as a + b * rows + c * rows * depth, where depth is how far into their prompts the rows
begin: attention costs more the more there is to look back at. The three coefficients are learned online by recursive
least squares, because they belong to this machine, this model and this moment. Forgetting is directional (Kulhavy,
"Restricted exponential forgetting in real-time identification", Automatica 23, 1987): a batch replaces what is known
about batches like it and nothing else. With plain forgetting, an hour of short prompts would erase what depth costs,
and the next long one would get any number of rows.

A straight line is not the whole truth: kernels work on tiles, and how well 128 or 192 rows fill the threads depends on
the number of heads. So each size that suits tiles has a factor of its own on top of the line, learned the same way.

Does not: choose a size (`budget.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Kernels work on tiles of this many rows (`GGML_FA_TILE_Q` of llama.cpp, and powers of two of it elsewhere).
TILE_ROWS = 64
# Less than a tile, for targets that a tile would miss. Prompts always progress by the smallest, on any machine.
SMALL_ROWS = (16, 32, 48)
# Until so many batches were seen the guess is worth nothing.
_WARM_UP = 4
_FORGETTING = 0.98
_LATEST = 0.2  # weight of the latest measurement in a factor
_DEPTH_UNIT = 1024
_PRIOR_VARIANCE = 1e3
_LEAST_S = 1e-6
_LEAST_WEIGHTS = np.array([-np.inf, 0.0, 0.0])


class CostModel:
    """Learns from `observe`, answers `predict_s` once `is_warm`."""

    def __init__(self) -> None:
        self._weights = np.zeros(3)
        self._covariance = np.eye(3) * _PRIOR_VARIANCE
        self._factors: dict[int, float] = {}
        self._n_seen = 0

    @property
    def is_warm(self) -> bool:
        return self._n_seen >= _WARM_UP

    def predict_s(self, n_rows: int, depth: float) -> float:
        """Seconds that so many rows from `depth` on are expected to take; always positive."""
        return max(_LEAST_S, float(_features(n_rows, depth) @ self._line())) * self._factors.get(n_rows, 1.0)

    def efficiency(self, n_rows: int, depth: float) -> float:
        """The part of a batch's time that its rows account for wherever they are computed; the rest is what this size
        of a batch costs on top. Rows per second would not do to compare sizes: a larger batch reaches deeper."""
        features = _features(n_rows, depth)
        return max(_LEAST_S, float(features[1:] @ self._line()[1:])) / self.predict_s(n_rows, depth)

    def observe(self, n_rows: int, depth: float, seconds: float) -> None:
        """So many rows took so long."""
        features = _features(n_rows, depth)
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

    def _line(self) -> NDArray[np.float64]:
        """The coefficients. More rows, or deeper ones, never take less: where all batches so far were of one size,
        noise may say so, and a larger batch would seem to cost nothing."""
        line: NDArray[np.float64] = np.maximum(self._weights, _LEAST_WEIGHTS)
        return line


def sizes(limit: int) -> list[int]:
    """Numbers of rows that suit the kernels, and `limit` where it is less than any."""
    fitting = [*SMALL_ROWS, *range(TILE_ROWS, limit + 1, TILE_ROWS)]
    return [n_rows for n_rows in fitting if n_rows <= limit] or [limit]


def _features(n_rows: int, depth: float) -> NDArray[np.float64]:
    """All of the order of 1, or the squares would be badly conditioned."""
    tiles = n_rows / TILE_ROWS
    return np.array([1.0, tiles, tiles * (depth + n_rows / 2) / _DEPTH_UNIT])
