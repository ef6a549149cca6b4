"""What a request adds to logits before a token is chosen: its bias, and its penalties for recent tokens. Pure.

Done here and not by llama.cpp's own stages, which take a call for every token of the window, 200 ms for a prompt of
131,000, and look up every token of the vocabulary for each one that is chosen. The results are the same. These two are
the first stages there are, so what follows them finds the logits as if they had been stages, too.

Owner: whoever samples a request, one thread at a time. Does not: choose, or leave a trace in the logits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from localrun.engine.sample.sampling import LogitBias, Penalties, Stage


class Adjustments:
    """See the module. Of `stages` the others are ignored; tokens in `banned` get a logit of minus infinity."""

    def __init__(self, stages: Sequence[Stage], banned: NDArray[np.int64]) -> None:
        biases = next((stage.biases for stage in stages if isinstance(stage, LogitBias)), ())
        self._biased = np.array([token for token, _ in biases], np.int64)
        self._biases = np.array([bias for _, bias in biases], np.float32)
        self._banned = banned
        self._penalties = next((stage for stage in stages if isinstance(stage, Penalties)), None)
        self._recent: deque[int] = deque()
        self._counts: Counter[int] = Counter()

    def accept(self, tokens: Sequence[int]) -> None:
        """These came last."""
        if self._penalties is None:
            return
        window = tokens[-self._penalties.last_n :]
        self._recent.extend(window)
        self._counts.update(window)
        while len(self._recent) > self._penalties.last_n:
            oldest = self._recent.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    @contextmanager
    def applied(self, logits: NDArray[np.float32]) -> Iterator[None]:
        """Inside of this the logits are the adjusted ones."""
        recent = np.fromiter(self._counts, np.int64, len(self._counts))
        touched = np.concatenate((self._biased, recent, self._banned))
        saved = logits[touched]
        np.add.at(logits, self._biased, self._biases)
        if self._penalties is not None:
            logits[recent] = self._penalized(logits[recent], self._penalties)
        logits[self._banned] = -np.inf
        try:
            yield
        finally:
            logits[touched] = saved

    def _penalized(self, logits: NDArray[np.float32], by: Penalties) -> NDArray[np.float32]:
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        repeat, frequency, presence = np.float32(by.repeat), np.float32(by.frequency), np.float32(by.presence)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            repeated = np.where(logits <= 0, logits * repeat, logits / repeat)
        penalized: NDArray[np.float32] = repeated - (counts * frequency + presence)
        return penalized
