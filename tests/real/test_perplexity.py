"""The perplexity of a fixed text, token by token as requests to the engine, against plain llama.cpp's.

Each request is the text up to one position; its only choice is the token that comes there, and the log-probability
that it reports is what counts. So every one of them goes on from what the ones before left in the cache.

Plain llama.cpp agrees with itself only in batches of the same shape: in others, single tokens are more or less likely
by up to e^0.6, in both directions. So it is given the batches that the engine computed, going on from as many tokens
as each request found in the cache, and then has to agree with the engine token by token. A single cell that was lost,
or foreign, would show.

The short run takes 256 tokens, in the middle of which the text outgrows Gemma's window; the long one takes all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.real.conftest import HOW_MUCH, RealModel
from tests.real.plain import logprob
from tests.real.prompts import fixed_text

MOST_OFF = 0.001
MOST_OFF_OF_ONE = 0.01


def test_perplexity(model: RealModel, say: Callable[[str], None]) -> None:
    tokens = model.plain.tokenize(fixed_text())
    positions = range(64, len(tokens)) if HOW_MUCH == "all" else range(384, 640)
    runner = model.run(n_cells=8 * (positions[-1] + 64))
    ours, theirs = np.zeros((2, len(positions)))
    for index, at in enumerate(positions):
        ours[index] = runner.logprob(tokens[:at], tokens[at])
        theirs[index] = logprob(model.plain.replay(tokens, runner.n_cached[-1], runner.n_rows)[-1], tokens[at])
    n_cached = runner.n_cached
    runner.close()
    assert sum(n_cached[1:]) > 0.9 * sum(positions[1:]), "nearly all of the text came from the cache"
    differences = theirs - ours
    off = float(np.expm1(differences.mean()))
    full = model.plain.logprobs_in_full_batches(tokens[: positions[-1] + 1])[positions[0] - 1 :]
    say(
        f"{model.name}, perplexity of {len(ours)} of {len(tokens)} tokens: {np.exp(-ours.mean()):.4f}\n"
        f"  plain llama.cpp in the same batches: off by {off:+.5%}, {np.count_nonzero(differences == 0)} tokens equal "
        f"to the last bit, one off by up to {np.abs(differences).max():.4f}\n"
        f"  plain llama.cpp in batches of 512 rows: {np.exp(-full.mean()):.4f}, one token off by up to "
        f"{np.abs(full - ours).max():.2f}"
    )
    assert abs(off) < MOST_OFF
    assert np.abs(differences).max() < MOST_OFF_OF_ONE


def test_one_foreign_token_would_be_seen(model: RealModel) -> None:
    tokens = model.plain.tokenize(fixed_text())
    foreign = [*tokens[:100], tokens[101], *tokens[101:]]
    right, wrong = (
        [logprob(row, tokens[at]) for at, row in enumerate(model.plain.replay(text, 0, [384, *[1] * 15]), 384)]
        for text in (tokens, foreign)
    )
    assert np.abs(np.subtract(wrong, right)).max() > 2 * MOST_OFF_OF_ONE
