from __future__ import annotations

import numpy as np
import pytest

from localrun.engine.sample.chain import MirostatDraws, Nucleus, bits_at, fraction, native_seed


def test_neighbouring_seeds_and_positions_have_nothing_in_common():
    fractions = [fraction(bits_at(seed, position), 1) for seed in range(-5, 45) for position in range(200)]
    counts, _ = np.histogram(fractions, 10, (0.0, 1.0))
    assert counts.sum() == 10_000
    assert abs(counts - 1000).max() < 150
    assert len({native_seed(bits_at(seed, position)) for seed in range(50) for position in range(200)}) > 9_990


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_comes_near_its_surprise_and_goes_on_from_its_mu(version: int):
    generator = np.random.default_rng(0)
    rows = generator.normal(0, 3, (400, 2000)).astype(np.float32)
    chances = generator.random(400)

    def drawn(mirostat: MirostatDraws, begin: int) -> list[int]:
        found = []
        for row, chance in zip(rows[begin:], chances[begin:], strict=True):
            mirostat.draw(row, 0.5)  # not the last draw, so it does not count
            found.append(mirostat.draw(row, float(chance)))
            mirostat.accept()
        return found

    first = MirostatDraws(version, tau=4.0, eta=0.1, temperature=1.0, n_vocab=2000)
    tokens = drawn(first, 0)
    weights = np.exp(rows.astype(np.float64))
    surprises = -np.log2(weights[np.arange(400), tokens] / weights.sum(1))
    assert 2.5 < surprises[100:].mean() < 7.5
    half = MirostatDraws(version, tau=4.0, eta=0.1, temperature=1.0, n_vocab=2000)
    for row, chance in zip(rows[:200], chances[:200], strict=True):
        half.draw(row, float(chance))
        half.accept()
    other = MirostatDraws(version, tau=4.0, eta=0.1, temperature=1.0, n_vocab=2000)
    other.mu = half.mu
    assert drawn(other, 200) == tokens[200:]


def test_mirostat_never_draws_what_is_banned():
    logits = np.full(50, -np.inf, np.float32)
    logits[7] = 1.0
    for version in (1, 2):
        mirostat = MirostatDraws(version, tau=5.0, eta=0.1, temperature=0.5, n_vocab=50)
        assert {mirostat.draw(logits, at) for at in (0.0, 0.5, 1 - 2**-53)} == {7}


def chances(logits: np.ndarray, *, top_p: float, min_p: float, temperature: float) -> np.ndarray:
    """By the definitions: what is left after top-p and min-p, at this temperature."""
    scaled = logits.astype(np.float64) - logits.max()
    weights = np.exp(scaled)
    order = np.argsort(-weights, kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(weights[order]) / weights.sum(), top_p)) + 1 if top_p < 1 else logits.size
    kept = np.zeros(logits.size, bool)
    kept[order[:n_kept]] = True
    kept &= weights >= min(min_p, 1.0)
    made = np.where(kept, np.exp(scaled / temperature), 0.0)
    return made / made.sum()


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("n_tokens", [1, 2, 511, 513, 3000])
@pytest.mark.parametrize(
    ("top_p", "min_p", "temperature"),
    [
        (1.0, 0.0, 1.0), (1.0, 0.0, 0.3), (0.9, 0.0, 1.0), (0.9, 0.05, 0.7), (1.0, 0.1, 2.0), (0.0, 0.0, 1.0),
        (0.5, 2.0, 1.0),
    ],
)  # fmt: skip
def test_as_much_of_a_line_falls_to_each_token_as_it_is_likely(
    spread: float, n_tokens: int, top_p: float, min_p: float, temperature: float
):
    logits = np.random.default_rng(n_tokens).normal(-3, spread, n_tokens).astype(np.float32)
    logits[1:4] = logits[0]  # equally likely ones
    nucleus = Nucleus(top_p=top_p, min_p=min_p, temperature=temperature)
    n_places = max(500, min(4 * n_tokens, 4000))
    places = (np.arange(n_places) + 0.5) / n_places
    drawn = np.bincount([nucleus.draw(logits, float(at)) for at in places], minlength=n_tokens) / n_places
    expected = chances(logits, top_p=top_p, min_p=min_p, temperature=temperature)
    # One token at the border may be in or out, by rounding.
    assert np.abs(drawn - expected).sum() < 2 * expected[expected > 0].min() + 2 * np.count_nonzero(expected) / n_places
    assert np.count_nonzero(drawn[expected == 0]) <= 1


@pytest.mark.parametrize("how", [{}, {"top_p": 0.99}, {"min_p": 0.01}, {"temperature": 1e-6}])
def test_the_ends_of_the_line_are_tokens_that_may_be_drawn(how: dict[str, float]):
    logits = np.full(2000, -np.inf, np.float32)
    logits[[3, 700]] = 5.0, 4.9
    nucleus = Nucleus(**{"top_p": 1.0, "min_p": 0.0, "temperature": 1.0} | how)
    for at in (0.0, 0.25, 0.75, 1 - 2**-53):
        assert nucleus.draw(logits, at) in (3, 700)
        assert nucleus.draw(logits[700:701], at) == 0  # fewer, as with a grammar
    logits[:] = -np.inf
    logits[1999] = -1e30
    assert nucleus.draw(logits, 1 - 2**-53) == 1999
