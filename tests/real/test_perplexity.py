"""The perplexity of a fixed text, token by token as requests to the engine, against plain llama.cpp's in full batches.

Each request is the text up to one position; its only choice is the token that comes there, and the log-probability
that it reports is what counts. So every one of them goes on from what the one before left in the cache.
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
    step = 1 if HOW_MUCH == "all" else 2
    positions = range(FIRST, len(tokens), step)
    plain = model.plain.logprobs(tokens, FIRST)[::step]
    runner = model.run(n_slots=1, n_cells=len(tokens) + 64)
    ours = np.array([runner.logprob(tokens[:at], tokens[at]) for at in positions])
    runner.close()
    perplexity, expected = np.exp(-ours.mean()), np.exp(-plain.mean())
    off = perplexity / expected - 1
    say(f"{model.name}, perplexity of {len(positions)} tokens: {perplexity:.4f}, plain llama.cpp {expected:.4f}, "
        f"off by {off:+.4%}; one token's log-probability by up to {np.abs(ours - plain).max():.3f}")  # fmt: skip
    assert abs(off) < MOST_OFF
