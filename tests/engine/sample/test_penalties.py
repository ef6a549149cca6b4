"""Bias and penalties against llama.cpp's own stages, and what they cost."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.engine.native import sampler as llama_sampler
from localrun.engine.native.library import native
from localrun.engine.native.sampler import LlamaSampler
from localrun.engine.sample.chain import Adjustments, Draw, Greedy, LogitBias, Penalties

N_VOCAB = 50
NOBODY = np.empty(0, np.int64)
numbers = st.floats(-2, 2, width=32)
tokens = st.lists(st.integers(0, N_VOCAB - 1), max_size=30)


def by_llama_cpp(
    logits: np.ndarray, biases: Sequence[tuple[int, float]], penalties: Penalties, seen: Sequence[int]
) -> np.ndarray:
    chain = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
    array = (native.llama_logit_bias * len(biases))(*biases)
    native.llama_sampler_chain_add(chain, native.llama_sampler_init_logit_bias(N_VOCAB, len(biases), array))
    values = (penalties.last_n, penalties.repeat, penalties.frequency, penalties.presence)
    native.llama_sampler_chain_add(chain, native.llama_sampler_init_penalties(N_VOCAB, *values))
    for token in seen:
        native.llama_sampler_accept(chain, token)
    data = (native.llama_token_data * N_VOCAB)(*((token, logit, 0.0) for token, logit in enumerate(logits.tolist())))
    candidates = native.llama_token_data_array(data=data, size=N_VOCAB, selected=-1, sorted=False)
    native.llama_sampler_apply(chain, ctypes.byref(candidates))
    native.llama_sampler_free(chain)
    return np.array([data[at].logit for at in range(N_VOCAB)], np.float32)


@given(
    logits=st.lists(numbers, min_size=N_VOCAB, max_size=N_VOCAB),
    biases=st.lists(st.tuples(st.integers(0, N_VOCAB - 1), numbers), max_size=4),
    penalties=st.builds(Penalties, st.integers(1, 12), st.floats(0.5, 2, width=32), numbers, numbers),
    prompt=tokens,
    output=tokens,
)
def test_adjusted_logits_are_those_of_llama_cpp_and_then_as_before(
    logits: list[float], biases: list[tuple[int, float]], penalties: Penalties, prompt: list[int], output: list[int]
):
    row = np.array(logits, np.float32)
    before = row.copy()
    adjustments = Adjustments([LogitBias(tuple(biases)), penalties, Greedy()], NOBODY)
    adjustments.accept(prompt)
    for token in output:
        adjustments.accept([token])
    with adjustments.applied(row):
        expected = by_llama_cpp(before, biases, penalties, [*prompt, *output])
        np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(row, before)


def test_banned_tokens_have_no_chance_whatever_their_bias():
    row = np.zeros(4, np.float32)
    with Adjustments([LogitBias(((2, 100.0),))], np.array([2])).applied(row):
        assert row.tolist() == [0, 0, -np.inf, 0]
    assert not row.any()


@pytest.mark.parametrize("last", [Greedy(), Draw(1)])
def test_a_long_prompt_is_shown_to_the_penalties_without_a_native_call(monkeypatch: pytest.MonkeyPatch, last: object):
    calls: list[int] = []
    monkeypatch.setattr(llama_sampler.native, "llama_sampler_accept", lambda _chain, token: calls.append(token))
    sampler = LlamaSampler(
        lambda _chain, _row: 0, lambda _row: np.zeros(N_VOCAB, np.float32),
        [Penalties(1 << 17, 1.1, 0.0, 0.0), last],  # type: ignore[list-item]
        banned=NOBODY, n_vocab=N_VOCAB, new_dry=lambda _stage: None,
    )  # fmt: skip
    sampler.accept([at % N_VOCAB for at in range(100_000)])
    sampler.sample(0)
    sampler.close()
    assert calls == []
