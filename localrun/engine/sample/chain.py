"""Which sampler stages a request needs, in order. Pure; `llama.py` turns each stage into a native sampler.

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
    """0 leaves the likeliest token alone."""

    value: float


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
    LogitBias
    | Penalties
    | Dry
    | TopNSigma
    | TopK
    | Typical
    | TopP
    | MinP
    | Xtc
    | Temperature
    | Mirostat
    | Draw
    | Greedy
)

# Dividing logits by less overflows, and long before that the draw is an argmax.
_LEAST_TEMPERATURE = 1e-6


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
    is_greedy = sampling.temperature < _LEAST_TEMPERATURE
    if is_greedy and not has_xtc:
        return (*stages, dry, Temperature(0.0), Draw(0)) if dry else (*stages, Greedy())
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    if sampling.mirostat and not is_greedy:
        tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
        return (*stages, Mirostat(sampling.mirostat, seed, tau, eta, sampling.temperature))
    if dry:
        stages.append(dry)
    if sampling.top_n_sigma > 0:
        stages.append(TopNSigma(sampling.top_n_sigma))
    if sampling.top_k > 0:
        stages.append(TopK(sampling.top_k))
    if sampling.typical_p < 1:
        stages.append(Typical(sampling.typical_p))
    if sampling.top_p < 1:
        stages.append(TopP(sampling.top_p))
    if sampling.min_p > 0:
        stages.append(MinP(sampling.min_p))
    if has_xtc:
        stages.append(Xtc(sampling.xtc_probability, sampling.xtc_threshold))
    if sampling.temperature != 1:
        stages.append(Temperature(0.0 if is_greedy else sampling.temperature))
    return (*stages, Draw(seed))


def dry_of(sampling: Sampling, n_ctx: int) -> Dry | None:
    """The DRY stage of a chain; None if it is off."""
    if sampling.dry_multiplier == 0 or sampling.dry_penalty_last_n == 0:
        return None
    last_n = n_ctx if sampling.dry_penalty_last_n < 0 else min(sampling.dry_penalty_last_n, n_ctx)
    return Dry(
        sampling.dry_multiplier,
        sampling.dry_base,
        sampling.dry_allowed_length,
        last_n,
        sampling.dry_sequence_breakers,
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
