"""How often each token is drawn is what its probability says, at a drafted row as well."""

from __future__ import annotations

import numpy as np
import pytest

from localrun.engine.native.llama import LlamaBackend
from localrun.wire import Sampling

PROMPT = [300, 301, 302, 303, 304]
N_SEEDS, N_KEPT = 2000, 12
# The model is a small one whose logits hardly differ, hence the low temperature below.
SAMPLINGS = {
    "kept": {"top_k": N_KEPT},
    "top-p": {"top_k": 0, "top_p": 0.05},
    "min-p": {"top_k": 0, "min_p": 0.5},
    "mirostat": {"top_k": 0, "mirostat": 2, "mirostat_tau": 1.5},
    "penalized": {"top_k": N_KEPT, "repeat_penalty": 1.5, "penalty_last_n": 64},
}


def shares(logits: np.ndarray, sampling: Sampling, seen: list[int]) -> np.ndarray:
    """The exact probabilities."""
    logits = logits.astype(np.float64)
    if sampling.repeat_penalty != 1:
        for token in set(seen):
            logits[token] *= sampling.repeat_penalty if logits[token] <= 0 else 1 / sampling.repeat_penalty
    if sampling.top_k:
        logits[logits < np.sort(logits)[-sampling.top_k]] = -np.inf
    if sampling.top_p < 1:
        order = np.argsort(logits)[::-1]
        sums = np.cumsum(np.exp(logits[order]) / np.exp(logits).sum())
        logits[order[1 + int(np.searchsorted(sums, sampling.top_p)) :]] = -np.inf
    if sampling.mirostat:
        logits = logits / sampling.temperature
        surprises = np.log2(np.exp(logits - logits.max()).sum()) - (logits - logits.max()) / np.log(2)
        logits[surprises > 2 * sampling.mirostat_tau] = -np.inf
        return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    if sampling.min_p:
        logits[logits < logits.max() + np.log(sampling.min_p)] = -np.inf
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    return weights / weights.sum()


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_of_a_row_and_of_the_drafted_one_after_it_are_drawn_as_often_as_they_should(
    backend: LlamaBackend, name: str
):
    count, batch = len(PROMPT) + 1, backend.batch
    batch.token[:count] = [*PROMPT, 305]
    batch.pos[:count] = range(count)
    batch.seq[:count] = 0
    batch.wants_logits[:count] = [0] * (count - 2) + [1, 1]
    backend.decode(count)
    drawn: list[list[int]] = [[], []]
    for seed in range(N_SEEDS):
        how = {"temperature": 0.03, "top_p": 1.0, "min_p": 0.0, "seed": seed} | SAMPLINGS[name]
        sampling = Sampling(**how)
        for at, row in enumerate((count - 2, count - 1)):
            sampler = backend.sampler(sampling, ignore_eos=False)
            sampler.accept([*PROMPT, 305][: len(PROMPT) + at])
            drawn[at] += backend.sample([(sampler, row)])
            sampler.close()
    for at, row in enumerate((count - 2, count - 1)):
        expected = shares(backend.logits(row).copy(), sampling, [*PROMPT, 305][: len(PROMPT) + at]) * N_SEEDS
        counts = np.bincount(drawn[at], minlength=len(expected))
        assert not counts[expected == 0].any()
        often = expected >= 5
        rest = expected[~often].sum()
        chi_square = ((counts - expected)[often] ** 2 / expected[often]).sum()
        n_free = int(often.sum()) - 1 + (rest >= 5)
        if rest >= 5:
            chi_square += (counts[~often].sum() - rest) ** 2 / rest
        assert chi_square < n_free + 5 * np.sqrt(2 * n_free) + 10
