"""DRY, top-n-sigma and XTC do what plain chains of llama.cpp do, for tokens that were drafted as well."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from localrun.engine.native.library import native
from localrun.engine.native.llama import LlamaBackend
from localrun.engine.sample import chain
from localrun.errors import BadRequest
from localrun.wire import Sampling

# What repeats, so that DRY has something to do: 301 302 303 were followed by 304 before.
PROMPT = [300, 301, 302, 303, 304, 305, 301, 302, 303, 304, 306, 301, 302, 303]
N_SEEDS = 2000
DRY = {"dry_multiplier": 3.0, "dry_base": 2.0, "dry_allowed_length": 1, "dry_penalty_last_n": -1}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "dry": {"top_k": 12, **DRY},
    "top-n-sigma": {"top_n_sigma": 2.5},
    "xtc": {"top_k": 12, "xtc_probability": 0.5, "xtc_threshold": 0.08},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "top_n_sigma": 3.0, "xtc_probability": 0.3, **DRY},
    "dynatemp": {"temperature": 0.8, "top_p": 0.9, "dynatemp_range": 0.7, "dynatemp_exponent": 0.5},
    "dynatemp from 0": {"temperature": 0.0, "top_k": 12, "dynatemp_range": 1.2},
    "xtc without temperature": {"temperature": 0.0, "top_k": 12, "xtc_probability": 0.5, "xtc_threshold": 0.08},
}  # fmt: skip


class PlainChain:
    """The stages of llama-server's default order by bare calls, without the draw; `xtc` is whether XTC acts."""

    def __init__(self, backend: LlamaBackend, sampling: Sampling, *, xtc: bool) -> None:
        vocabulary = native.llama_model_get_vocab(backend._model)
        breakers = [text.encode() for text in sampling.dry_sequence_breakers]
        texts = (ctypes.c_char_p * len(breakers))(*breakers)
        last_n = backend.n_ctx if sampling.dry_penalty_last_n < 0 else sampling.dry_penalty_last_n
        self._chain = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
        for stage in (
            native.llama_sampler_init_dry(
                vocabulary, sampling.dry_multiplier, sampling.dry_base, sampling.dry_allowed_length, last_n, texts,
                len(breakers),
            ),
            native.llama_sampler_init_top_n_sigma(sampling.top_n_sigma),
            native.llama_sampler_init_top_k(sampling.top_k),
            native.llama_sampler_init_typical(sampling.typical_p, 1),
            native.llama_sampler_init_top_p(sampling.top_p, 1),
            native.llama_sampler_init_min_p(sampling.min_p, 1),
            native.llama_sampler_init_xtc(float(xtc), sampling.xtc_threshold, 1, 1),
            native.llama_sampler_init_temp_ext(
                sampling.temperature, sampling.dynatemp_range, sampling.dynatemp_exponent
            ),
        ):  # fmt: skip
            native.llama_sampler_chain_add(self._chain, stage)

    def shares(self, logits: np.ndarray, seen: Sequence[int], allowed: np.ndarray | None = None) -> np.ndarray:
        """The exact probabilities after these tokens, of all tokens or the allowed ones."""
        for token in seen:
            native.llama_sampler_accept(self._chain, token)
        kinds = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        allowed = np.arange(logits.size) if allowed is None else allowed
        candidates = np.zeros(allowed.size, kinds)
        candidates["id"], candidates["logit"] = allowed, logits[allowed]
        data = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(native.llama_token_data))
        array = native.llama_token_data_array(data=data, size=allowed.size, selected=-1, sorted=False)
        native.llama_sampler_apply(self._chain, ctypes.byref(array))
        left = [(array.data[at].id, array.data[at].logit) for at in range(array.size)]
        native.llama_sampler_free(self._chain)
        result = np.zeros(logits.size)
        highest = max(logit for _, logit in left)
        for token, logit in left:
            result[token] = np.exp(np.float64(logit) - highest)
        return result / result.sum()


class AllowOnly:
    """A constraint that never changes."""

    def __init__(self, allowed: np.ndarray) -> None:
        self._allowed = allowed

    def choose(self, draw: Any, *, tries_first: bool) -> int:
        return int(draw(self._allowed))


def decode_last_two(backend: LlamaBackend) -> tuple[int, int]:
    """The rows of the last two tokens of the prompt, of which the last one may be a draft."""
    count, batch = len(PROMPT), backend.batch
    batch.token[:count] = PROMPT
    batch.pos[:count] = range(count)
    batch.seq[:count] = 0
    batch.wants_logits[:count] = [0] * (count - 2) + [1, 1]
    backend.decode(count)
    return count - 2, count - 1


def sampling_of(name: str, seed: int) -> Sampling:
    return Sampling(**({"temperature": 0.05, "seed": seed} | SAMPLINGS[name]))


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_drawn_as_often_as_a_plain_chain_says(backend: LlamaBackend, name: str):
    for row in decode_last_two(backend):
        seen, drawn = PROMPT[: row + 1], []
        for seed in range(N_SEEDS):
            sampler = backend.sampler(sampling_of(name, seed), ignore_eos=False)
            sampler.accept(seen)
            drawn += backend.sample([(sampler, row)])
            sampler.close()
        sampling, logits = sampling_of(name, 0), backend.logits(row).copy()
        often_cut = sampling.xtc_probability
        expected = N_SEEDS * (
            often_cut * PlainChain(backend, sampling, xtc=True).shares(logits, seen)
            + (1 - often_cut) * PlainChain(backend, sampling, xtc=False).shares(logits, seen)
        )
        counts = np.bincount(drawn, minlength=expected.size)
        assert not counts[expected == 0].any()
        often = expected >= 5
        assert ((counts - expected)[often] ** 2 / expected[often]).sum() < often.sum() + 5 * np.sqrt(
            2 * often.sum()
        ) + 10


def test_dry_counts_for_the_likeliest_token_and_follows_what_was_sampled(backend: LlamaBackend):
    row = decode_last_two(backend)[1]
    logits, chance = backend.logits(row).copy(), random.Random(7)
    best = np.argsort(-logits)[:6].tolist()
    sampling = Sampling(temperature=0, **DRY)
    sampler = backend.sampler(sampling, ignore_eos=False)
    seen = [chance.choice(best) for _ in range(30)]
    sampler.accept(seen)
    for _ in range(40):
        expected = int(PlainChain(backend, sampling, xtc=False).shares(logits, seen).argmax())
        (token,) = backend.sample([(sampler, row)])
        assert token == expected
        seen.append(token)
    sampler.close()
    assert len(set(seen[30:])) > 1, "nothing was penalized"


def test_dry_is_told_of_tokens_that_a_constraint_chose(backend: LlamaBackend):
    row = decode_last_two(backend)[1]
    logits = backend.logits(row).copy()
    allowed = np.sort(np.argsort(-logits)[:5])
    sampling = Sampling(temperature=0, **DRY)
    sampler = backend.sampler(sampling, ignore_eos=False)
    sampler.constrain(AllowOnly(allowed))  # type: ignore[arg-type]
    seen: list[int] = []
    for _ in range(30):
        shares = PlainChain(backend, sampling, xtc=False).shares(logits, seen, allowed)
        (token,) = backend.sample([(sampler, row)])
        assert token == int(shares.argmax())
        seen.append(token)
    sampler.close()
    assert len(set(seen)) > 1


def test_a_breaker_ends_what_repeats(backend: LlamaBackend):
    row = decode_last_two(backend)[1]
    logits = backend.logits(row).copy()
    best, other = np.argsort(-logits)[:2].tolist()
    seen = [other, other, best, other, other]
    text = backend.piece(other).decode("utf-8", "replace")
    chosen = []
    for breakers in (("never there",), (text,)):
        sampling = Sampling(temperature=0, **(DRY | {"dry_multiplier": 50.0}), dry_sequence_breakers=breakers)
        sampler = backend.sampler(sampling, ignore_eos=False)
        sampler.accept(seen)
        chosen += backend.sample([(sampler, row)])
        sampler.close()
    assert chosen[0] != best
    assert chosen[1] == best


def test_breakers_are_looked_up_once(backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    made, real = [], native.llama_sampler_init_dry
    monkeypatch.setattr(native, "llama_sampler_init_dry", lambda *how: made.append(how) or real(*how))
    sampling = Sampling(dry_multiplier=0.77)
    backend.learn(sampling)
    for _ in range(3):
        backend.sampler(sampling, ignore_eos=False).close()
    for at in range(20):  # and only so many are kept
        backend.learn(Sampling(dry_multiplier=1.0 + at))
    assert len(made) == 21
    backend.learn(Sampling())
    assert len(made) == 21


@pytest.mark.parametrize("field", ["dry_multiplier", "dry_base", "top_n_sigma", "xtc_probability", "xtc_threshold"])
def test_what_is_no_number_is_refused_by_name(field: str):
    with pytest.raises(BadRequest, match=field):
        chain.check(Sampling(**{field: float("nan")}), n_vocab=10)


@pytest.mark.parametrize("breaker", ["", "a\0b"])
def test_a_breaker_that_is_none_is_refused_by_name(breaker: str):
    with pytest.raises(BadRequest, match="dry_sequence_breakers"):
        chain.check(Sampling(dry_sequence_breakers=(breaker,)), n_vocab=10)
