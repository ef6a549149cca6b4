"""The perplexity of a fixed text, token by token as requests to the engine, against plain llama.cpp's.

Each request is the text up to one position; its only choice is the token that comes there, and the log-probability
that it reports is what counts. So every one of them goes on from what the one before left in the cache.

Plain llama.cpp agrees with itself only in batches of the same shape. In others single tokens are more or less likely
by up to e^0.7 (Gemma), in both directions, which leaves a mean that scatters by the standard error. So the perplexities
must agree within a thousandth and twice that error. The long run takes all tokens instead of every sixteenth.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.real.conftest import HOW_MUCH, RealModel
from tests.real.prompts import fixed_text

FIRST = 64
MOST_OFF = 0.001


def test_perplexity(model: RealModel, say: Callable[[str], None]) -> None:
    tokens = model.plain.tokenize(fixed_text())
    step = 1 if HOW_MUCH == "all" else 16
    plain = {
        f"batches of {step}": model.plain.logprobs(tokens, FIRST, step),
        "batches of 512": model.plain.logprobs_in_full_batches(tokens)[FIRST - 1 :: step],
    }
    runner = model.run(n_slots=1, n_cells=len(tokens) + 64)
    ours = np.array([runner.logprob(tokens[:at], tokens[at]) for at in range(FIRST, len(tokens), step)])
    n_cached = runner.n_cached
    runner.close()
    assert sum(n_cached) > 0.9 * sum(range(FIRST, len(tokens), step)), "most of the text came from the cache"
    say(f"{model.name}, perplexity of {len(ours)} of {len(tokens)} tokens: {np.exp(-ours.mean()):.4f}")
    allowed = []
    for shape, theirs in plain.items():
        differences = theirs - ours
        off, error = float(np.expm1(differences.mean())), float(differences.std() / np.sqrt(len(ours)))
        say(
            f"  plain llama.cpp in {shape}: {np.exp(-theirs.mean()):.4f}, off by {off:+.4%}, "
            f"standard error {error:.4%}, one token by up to {np.abs(differences).max():.3f}"
        )
        allowed.append(abs(off) < MOST_OFF + 2 * error)
    assert all(allowed)
