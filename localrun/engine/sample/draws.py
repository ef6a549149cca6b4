"""Chance by position: what is drawn for a token depends on the request's seed and on where the token stands, and on
nothing that was drawn before. So an answer goes on as it would have, on another engine or after a pause. Pure.

`Mirostat` is here and not llama.cpp's, whose state no other engine can be given. `Nucleus` is here because llama.cpp
takes ten times as long: it sorts the vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_BITS = 2**64 - 1
# The highest value of a native seed means a random one.
_NATIVE_SEEDS = 2**32 - 1
# Version 1 learns how steep the distribution is from so many of the likeliest tokens.
_N_LIKELIEST = 100


def bits_at(seed: int, position: int) -> int:
    """64 bits for a token at this position, as good as random (SplitMix64's finalizer, over the one and the other)."""
    return _mixed(_mixed(seed) + position)


def native_seed(bits: int) -> int:
    """A seed for native code."""
    return (bits >> 16) % _NATIVE_SEEDS


def fraction(bits: int, n_th: int) -> float:
    """The `n_th` number in [0, 1) for a token with these bits."""
    return (_mixed(bits + n_th) >> 11) / 2**53


def _mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _BITS
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _BITS
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _BITS
    return value ^ value >> 31


# The weights of so many tokens are summed at once, and then only those of one such block one by one.
_BLOCK = 512
# Logits are told apart so finely before they are sorted, and no further down than this.
_STEPS_A_UNIT, _N_STEPS = 8, 256


class Nucleus:
    """Draws from all tokens, or from the likeliest ones. `top_p` keeps the fewest that have this share of the
    probability together, `min_p` of these the ones with at least this share of the highest probability; 1 and 0 keep
    all. `temperature` counts after that, as in llama.cpp's default order.

    For `top_p` tokens are counted by how likely they are, in steps, and only those of one step are sorted.
    """

    def __init__(self, *, top_p: float, min_p: float, temperature: float) -> None:
        self._top_p, self._min_p, self._temperature = top_p, min(min_p, 1.0), temperature
        # Fresh memory for every token would take longer than all the rest.
        self._memory = np.empty((2, 0), np.float32)

    def draw(self, logits: NDArray[np.float32], at: float) -> int:
        """An index into `logits`, f32[n]; `at` in [0, 1) decides which."""
        if self._memory.shape[1] < logits.size:
            self._memory = np.empty((2, logits.size), np.float32)
        shifted, weights = self._memory[:, : logits.size]
        np.subtract(logits, logits.max(), out=shifted)
        if self._top_p >= 1 and self._min_p <= 0:
            np.divide(shifted, np.float32(self._temperature), out=shifted)
            return _drawn(np.exp(shifted, out=weights), at)
        np.exp(shifted, out=weights)
        if self._top_p < 1:
            kept = self._likeliest(shifted, weights)
            kept = kept[weights[kept] >= self._min_p]
        else:
            kept = np.flatnonzero(weights >= self._min_p)
        return int(kept[_drawn(np.exp(shifted[kept] / np.float32(self._temperature)), at)])

    def _likeliest(self, shifted: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.int64]:
        """Those that `top_p` keeps; of equally likely ones the first."""
        steps = np.minimum(shifted * -_STEPS_A_UNIT, _N_STEPS - 1).astype(np.intp)
        sums = np.cumsum(np.bincount(steps, weights))
        wanted = self._top_p * sums[-1]
        last = int(np.searchsorted(sums, wanted))
        # All of the steps above, and of this one as many as are needed.
        within = np.flatnonzero(steps == last)
        within = within[np.argsort(-weights[within], kind="stable")]
        missing = wanted - (sums[last - 1] if last else 0.0)
        within = within[: int(np.searchsorted(np.cumsum(weights[within], dtype=np.float64), missing)) + 1]
        return np.concatenate((np.flatnonzero(steps < last), within))


def _drawn(weights: NDArray[np.float32] | NDArray[np.float64], at: float) -> int:
    """The index where `at` of all the weight is exceeded; never one without weight."""
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK), dtype=np.float64))
    wanted = min(at * blocks[-1], np.nextafter(blocks[-1], 0.0))
    block = int(np.searchsorted(blocks, wanted, side="right"))
    before = blocks[block - 1] if block else 0.0
    own = weights[block * _BLOCK : (block + 1) * _BLOCK]
    sums = np.cumsum(own, dtype=np.float64)
    # Rounded differently, these may end a little below the block's sum: then it is the last one that has any weight.
    last = int(np.flatnonzero(own)[-1])
    return block * _BLOCK + min(int(np.searchsorted(sums, wanted - before, side="right")), last)


class Mirostat:
    """Keeps the surprise of an answer's tokens near `tau` bits (Basu et al., "Mirostat: A Neural Text Decoding
    Algorithm that Directly Controls Perplexity", ICLR 2021, algorithms 1 and 2, as in llama.cpp).

    `mu`, the largest surprise that a token may have, is twice `tau` at first, and is lowered after each token by `eta`
    times what its surprise was above `tau`. Version 2 leaves out the tokens that surprise more. Version 1 keeps the k
    likeliest, with k from `mu` and the exponent of Zipf's law that fits the likeliest 100 best.

    Owner: one request's sampler. `mu` is all there is to know of what came before.
    """

    def __init__(self, version: int, *, tau: float, eta: float, temperature: float, n_vocab: int) -> None:
        self.mu = 2 * tau
        self._next_mu = self.mu
        self._version = version
        self._tau, self._eta, self._temperature = tau, eta, temperature
        self._n_vocab = n_vocab

    def draw(self, logits: NDArray[np.float32], at: float) -> int:
        """The index of a token; `at` in [0, 1) decides. Drawn again for the same token, the last one counts."""
        scaled = (logits - logits.max()) / np.float32(self._temperature)
        kept, weights = self._truncated(scaled)
        found = _drawn(weights, at)
        surprise = -math.log2(weights[found] / weights.sum())
        self._next_mu = self.mu - self._eta * (surprise - self._tau)
        return int(kept[found])

    def accept(self) -> None:
        """What was drawn last is the token."""
        self.mu = self._next_mu

    def _truncated(self, scaled: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens to draw from, and their weights."""
        weights = np.exp(scaled, dtype=np.float32)
        if self._version == 1:
            k = self._k(scaled)
            kept = np.argpartition(-scaled, k - 1)[:k] if k < scaled.size else np.arange(scaled.size)
        else:
            # -log2 of the probability is at most mu.
            least = weights.sum(dtype=np.float64) * 2.0**-self.mu
            kept = np.flatnonzero(weights >= least)
            if not kept.size:
                kept = np.array([scaled.argmax()])
        return kept, weights[kept].astype(np.float64)

    def _k(self, scaled: NDArray[np.float32]) -> int:
        n_best = min(_N_LIKELIEST, scaled.size)
        best = -np.sort(-np.partition(scaled, scaled.size - n_best)[scaled.size - n_best :]).astype(np.float64)
        best = best[np.isfinite(best)]
        if best.size < 2:
            return 1
        ranks = np.log(np.arange(2, best.size + 1) / np.arange(1, best.size))
        exponent = float((ranks * (best[:-1] - best[1:])).sum() / (ranks * ranks).sum())
        epsilon = exponent - 1
        try:
            k = ((epsilon * 2.0**self.mu) / (1 - self._n_vocab**-epsilon)) ** (1 / exponent)
        except (ZeroDivisionError, OverflowError):
            return scaled.size
        return max(1, min(scaled.size, int(k))) if isinstance(k, float) and math.isfinite(k) else scaled.size
