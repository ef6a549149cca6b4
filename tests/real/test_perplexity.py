"""The perplexity of a fixed text, token by token as requests to the engine, against plain llama.cpp's.

Each request is the text up to one position; its only choice is the token that comes there, and the log-probability
that it reports is what counts. So every one of them goes on from what the one before left in the cache.

Plain llama.cpp agrees with itself only in batches of the same shape. In others single tokens are more or less likely
by up to e^0.7 (Gemma), in both directions, which leaves a mean that scatters by the standard error of the differences.
So the perplexities must agree within a thousandth and twice that error, which is next to nothing where the shapes are
the same: attention layers go on from the very token before, as plain llama.cpp does one row at a time. Gemma's window
is kept every 32 tokens, and what follows is computed anew in one batch.

The short run takes 256 tokens, in the middle of which the text outgrows the window; the long one takes all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.real.conftest import HOW_MUCH, RealModel
from tests.real.prompts import fixed_text

MOST_OFF = 0.001


def test_perplexity(model: RealModel, say: Callable[[str], None]) -> None:
    tokens = model.plain.tokenize(fixed_text())
    first, end = (64, len(tokens)) if HOW_MUCH == "all" else (384, 640)
    plain = {
        "one row at a time": model.plain.logprobs(tokens[:end], first),
        "batches of 512": model.plain.logprobs_in_full_batches(tokens[:end])[first - 1 :],
    }
    runner = model.run(n_slots=1, n_cells=len(tokens) + 64)
    ours = np.array([runner.logprob(tokens[:at], tokens[at]) for at in range(first, end)])
    n_cached = runner.n_cached
    runner.close()
    assert sum(n_cached[1:]) > 0.9 * sum(range(first + 1, end)), "most of the text came from the cache"
    say(f"{model.name}, perplexity of {len(ours)} of {len(tokens)} tokens: {np.exp(-ours.mean()):.4f}")
    allowed = []
    for shape, theirs in plain.items():
        differences = theirs - ours
        off, error = float(np.expm1(differences.mean())), float(differences.std() / np.sqrt(len(ours)))
        say(
            f"  plain llama.cpp, {shape}: {np.exp(-theirs.mean()):.4f}, off by {off:+.4%}, "
            f"standard error {error:.4%}, one token by up to {np.abs(differences).max():.3f}"
        )
        allowed.append(abs(off) < MOST_OFF + 2 * error)
    assert all(allowed)
