"""Which sampler stages a request needs, in order, and those that are done here. Pure; `native/sampler.py` turns the
others into native samplers.

Neutral stages are left out: every stage costs a pass over the candidates of the whole vocabulary.
The order (bias, penalties, DRY, truncation, XTC, temperature, draw) is llama.cpp's own default order.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localrun.errors import BadRequest
from localrun.wire import Sampling


@dataclass(frozen=True)
class LogitBias:
    biases: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Penalties:
    """`last_n` tokens are looked at, never -1 here."""

    last_n: int
    repeat: float
    frequency: float
    presence: float


@dataclass(frozen=True)
class Dry:
    """A penalty for tokens that would go on with what was there before: it grows with the length of what repeats, up to
    a breaker. `last_n` tokens are looked at, never -1 here."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    breakers: tuple[str, ...]


@dataclass(frozen=True)
class TopNSigma:
    """Only logits within so many standard deviations of the highest one."""

    n: float


@dataclass(frozen=True)
class TopK:
    k: int


@dataclass(frozen=True)
class Typical:
    p: float


@dataclass(frozen=True)
class TopP:
    p: float


@dataclass(frozen=True)
class MinP:
    p: float


@dataclass(frozen=True)
class Xtc:
    """Now and then leaves out the likeliest tokens, all but the last one that has at least the threshold's share."""

    probability: float
    threshold: float


@dataclass(frozen=True)
class Temperature:
    """0 leaves the likeliest token alone. With a `range` it is that much lower where the model is sure, and that much
    higher where it is not at all; `exponent` bends what is in between."""

    value: float
    range: float = 0.0
    exponent: float = 1.0


@dataclass(frozen=True)
class Mirostat:
    version: int
    seed: int
    tau: float
    eta: float
    temperature: float


@dataclass(frozen=True)
class Draw:
    """Pick at random by probability."""

    seed: int


@dataclass(frozen=True)
class Greedy:
    """Pick the most probable."""


Stage = (
    LogitBias | Penalties | Dry | TopNSigma | TopK | Typical | TopP | MinP
    | Xtc | Temperature | Mirostat | Draw | Greedy
)  # fmt: skip

# Dividing logits by less overflows, and long before that the draw is an argmax.
_LEAST_TEMPERATURE = 1e-6
# So that single precision has it, whatever the highest is.
_LEAST_DYNAMIC = 1e-3


def check(sampling: Sampling, *, n_vocab: int) -> None:
    """Raises BadRequest for values that no sampler is defined for: the native ones take them and return nonsense."""
    for name in _FLOATS:
        if not math.isfinite(getattr(sampling, name)):
            raise BadRequest(f"{name} is not a finite number", field=name)
    if any("\0" in breaker or not breaker for breaker in sampling.dry_sequence_breakers):
        raise BadRequest("dry_sequence_breakers has an empty text, or one with a NUL", field="dry_sequence_breakers")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < n_vocab:
            raise BadRequest(f"token {token} of logit_bias is not in 0..{n_vocab - 1}", field="logit_bias")
        if math.isnan(bias) or bias == math.inf:
            raise BadRequest(f"the bias of token {token} is {bias}; send a number, -inf to ban", field="logit_bias")


_FLOATS = (
    "temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty",
    "mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base", "top_n_sigma", "xtc_probability", "xtc_threshold",
    "dynatemp_range", "dynatemp_exponent",
)  # fmt: skip


def chain(sampling: Sampling, *, n_ctx: int) -> tuple[Stage, ...]:
    """The stages for `sampling`. A single `Greedy` means that an argmax over the logits is enough."""
    stages: list[Stage] = []
    if sampling.logit_bias:
        stages.append(LogitBias(sampling.logit_bias))
    penalties = _penalties(sampling, n_ctx)
    if penalties:
        stages.append(penalties)
    dry = dry_of(sampling, n_ctx)
    # Above a threshold of 0.5 there is never more than one such token.
    has_xtc = sampling.xtc_probability > 0 and sampling.xtc_threshold <= 0.5
    is_cold, is_dynamic = sampling.temperature < _LEAST_TEMPERATURE, sampling.dynatemp_range > 0
    if is_cold and not is_dynamic and not has_xtc:
        return (*stages, dry, Temperature(0.0), Draw(0)) if dry else (*stages, Greedy())
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    if sampling.mirostat and not is_cold:
        tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
        return (*stages, Mirostat(sampling.mirostat, seed, tau, eta, sampling.temperature))
    temperature = Temperature(0.0 if is_cold else sampling.temperature)
    if is_dynamic:
        lowest = max(sampling.temperature - sampling.dynatemp_range, _LEAST_DYNAMIC)
        highest = sampling.temperature + sampling.dynatemp_range
        temperature = Temperature((lowest + highest) / 2, (highest - lowest) / 2, sampling.dynatemp_exponent)
    others: tuple[tuple[bool, Stage | None], ...] = (
        (dry is not None, dry),
        (sampling.top_n_sigma > 0, TopNSigma(sampling.top_n_sigma)),
        (sampling.top_k > 0, TopK(sampling.top_k)),
        (sampling.typical_p < 1, Typical(sampling.typical_p)),
        (sampling.top_p < 1, TopP(sampling.top_p)),
        (sampling.min_p > 0, MinP(sampling.min_p)),
        (has_xtc, Xtc(sampling.xtc_probability, sampling.xtc_threshold)),
        (sampling.temperature != 1 or is_dynamic, temperature),
    )
    return (*stages, *(stage for is_on, stage in others if stage is not None and is_on), Draw(seed))


def dry_of(sampling: Sampling, n_ctx: int) -> Dry | None:
    """The DRY stage of a chain; None if it is off."""
    if sampling.dry_multiplier == 0 or sampling.dry_penalty_last_n == 0:
        return None
    last_n = n_ctx if sampling.dry_penalty_last_n < 0 else min(sampling.dry_penalty_last_n, n_ctx)
    return Dry(
        sampling.dry_multiplier, sampling.dry_base, sampling.dry_allowed_length, last_n, sampling.dry_sequence_breakers
    )


def _penalties(sampling: Sampling, n_ctx: int) -> Penalties | None:
    is_neutral = sampling.repeat_penalty == 1 and not sampling.presence_penalty and not sampling.frequency_penalty
    if is_neutral or sampling.penalty_last_n == 0:
        return None
    last_n = n_ctx if sampling.penalty_last_n < 0 else min(sampling.penalty_last_n, n_ctx)
    return Penalties(last_n, sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)


class Adjustments:
    """What a request adds to logits before a token is chosen: its bias, and its penalties for recent tokens.

    Done here and not by llama.cpp's own stages, which take a call for every token of the window, 200 ms for a prompt of
    131,000, and look up every token of the vocabulary for each one that is chosen. The results are the same. These two
    are the first stages there are, so what follows them finds the logits as if they had been stages, too.

    Owner: whoever samples a request, one thread at a time. Does not: choose, or leave a trace in the logits.

    Of `stages` the others are ignored; tokens in `banned` get a logit of minus infinity.
    """

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


# Chance by position: what is drawn for a token depends on the request's seed and on where the token stands, and on
# nothing that was drawn before. So an answer goes on as it would have, on another engine or after a pause. Mirostat is
# here and not llama.cpp's, whose state no other engine can be given. `Nucleus` is here because llama.cpp takes ten
# times as long: it sorts the vocabulary.

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


class MirostatDraws:
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
