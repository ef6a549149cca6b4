"""The perplexity of a fixed text, token by token as requests to the engine, against plain llama.cpp's.

Each request is the text up to one position; its only choice is the token that comes there, and the log-probability
that it reports is what counts. So every one of them goes on from what the one before left in the cache.

Plain llama.cpp gives the same perplexity only where its batches have the same shape: SmolLM2's is another by a
thousandth in batches of 512 rows and in batches of two, by rounding alone. So it is compared with both: very closely
with batches of as many rows as a request adds, and as closely as llama.cpp agrees with itself with full ones.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.real.conftest import HOW_MUCH, RealModel
from tests.real.prompts import fixed_text

FIRST = 64
MOST_OFF, MOST_OFF_FULL = 0.001, 0.005


def test_perplexity(model: RealModel, say: Callable[[str], None]) -> None:
    tokens = model.plain.tokenize(fixed_text())
    step = 1 if HOW_MUCH == "all" else 8
    full = model.plain.logprobs_in_full_batches(tokens)[FIRST - 1 :: step]
    plain = model.plain.logprobs(tokens, FIRST, step)
    runner = model.run(n_slots=1, n_cells=len(tokens) + 64)
    ours = np.array([runner.logprob(tokens[:at], tokens[at]) for at in range(FIRST, len(tokens), step)])
    n_cached = runner.n_cached
    runner.close()
    perplexity, expected, in_full = (float(np.exp(-logprobs.mean())) for logprobs in (ours, plain, full))
    off, off_full = perplexity / expected - 1, perplexity / in_full - 1
    say(f"{model.name}, perplexity of {len(ours)} of {len(tokens)} tokens: {perplexity:.4f}")
    for shape, its, by, its_logprobs in (("such", expected, off, plain), ("full", in_full, off_full, full)):
        most = np.abs(ours - its_logprobs).max()
        say(f"  plain llama.cpp in {shape} batches: {its:.4f} ({by:+.4%}), one token by up to {most:.3f}")
    assert sum(n_cached) > 0.9 * sum(range(FIRST, len(tokens), step)), "most of the text came from the cache"
    assert abs(off) < MOST_OFF
    assert abs(off_full) < MOST_OFF_FULL
