"""Which sampler stages a request needs, in order. Pure; `llama.py` turns each stage into a native sampler.

Neutral stages are left out: every stage costs a pass over the candidates of the whole vocabulary.
The order (bias, penalties, truncation, temperature, draw) is llama.cpp's own default order.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

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
class Temperature:
    value: float


@dataclass(frozen=True)
class Mirostat:
    version: int
    seed: int
    tau: float
    eta: float


@dataclass(frozen=True)
class Draw:
    """Pick at random by probability."""

    seed: int


@dataclass(frozen=True)
class Greedy:
    """Pick the most probable."""


Stage = LogitBias | Penalties | TopK | Typical | TopP | MinP | Temperature | Mirostat | Draw | Greedy

_SEED_LIMIT = 2**32


def chain(sampling: Sampling, *, n_ctx: int) -> tuple[Stage, ...]:
    """The stages for `sampling`. A single `Greedy` means that an argmax over the logits is enough."""
    stages: list[Stage] = []
    if sampling.logit_bias:
        stages.append(LogitBias(sampling.logit_bias))
    penalties = _penalties(sampling, n_ctx)
    if penalties:
        stages.append(penalties)
    if sampling.temperature <= 0:
        return (*stages, Greedy())
    seed = secrets.randbelow(_SEED_LIMIT) if sampling.seed is None else sampling.seed % _SEED_LIMIT
    if sampling.mirostat:
        mirostat = Mirostat(sampling.mirostat, seed, sampling.mirostat_tau, sampling.mirostat_eta)
        return (*stages, Temperature(sampling.temperature), mirostat)
    if sampling.top_k > 0:
        stages.append(TopK(sampling.top_k))
    if sampling.typical_p < 1:
        stages.append(Typical(sampling.typical_p))
    if sampling.top_p < 1:
        stages.append(TopP(sampling.top_p))
    if sampling.min_p > 0:
        stages.append(MinP(sampling.min_p))
    if sampling.temperature != 1:
        stages.append(Temperature(sampling.temperature))
    return (*stages, Draw(seed))


def _penalties(sampling: Sampling, n_ctx: int) -> Penalties | None:
    is_neutral = sampling.repeat_penalty == 1 and not sampling.presence_penalty and not sampling.frequency_penalty
    if is_neutral or sampling.penalty_last_n == 0:
        return None
    last_n = n_ctx if sampling.penalty_last_n < 0 else min(sampling.penalty_last_n, n_ctx)
    return Penalties(last_n, sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
