"""Samples several rows at once, on threads where that pays.

A native chain walks over the whole vocabulary, without the interpreter lock. Measured for 8 rows on two cores, one
thread and two: top-k 0.30 and 0.20 ms with 49,000 tokens, 0.80 and 0.45 with 152,000; top-p without top-k 68 and 34,
which is as much as the decode itself. An argmax takes 0.07 ms for all rows, less than handing it over.

Owner: the engine's main thread, which takes its share of the rows. Does not: know what a sampler does.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from localrun.engine.backend import Sampler

# Fewer logits than this are done before a thread is awake.
LEAST_LOGITS = 200_000


class SamplingThreads:
    """See the module. `n_threads` counts the caller's."""

    def __init__(self, n_threads: int, n_vocab: int) -> None:
        self._n_others = n_threads - 1
        self._n_vocab = n_vocab
        self._pool = ThreadPoolExecutor(self._n_others, "sampling") if self._n_others else None

    def sample(self, wanted: Sequence[tuple[Sampler, int]]) -> list[int]:
        """The next token of each (sampler, row)."""
        n_slow = sum(not sampler.is_greedy for sampler, _ in wanted)
        if self._pool is None or n_slow < 2 or n_slow * self._n_vocab < LEAST_LOGITS:
            return _sample(wanted)
        n_parts = min(self._n_others + 1, len(wanted))
        parts = [wanted[part::n_parts] for part in range(n_parts)]
        others = [self._pool.submit(_sample, part) for part in parts[1:]]
        sampled = [_sample(parts[0]), *(other.result() for other in others)]
        tokens = [0] * len(wanted)
        for part, part_tokens in enumerate(sampled):
            tokens[part::n_parts] = part_tokens
        return tokens

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _sample(wanted: Sequence[tuple[Sampler, int]]) -> list[int]:
    return [sampler.sample(row) for sampler, row in wanted]
