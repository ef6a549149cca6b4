from __future__ import annotations

import numpy as np
import pytest

from localrun.engine.sample.draws import Mirostat, bits_at, fraction, native_seed


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

    def drawn(mirostat: Mirostat, begin: int) -> list[int]:
        found = []
        for row, chance in zip(rows[begin:], chances[begin:], strict=True):
            mirostat.draw(row, 0.5)  # not the last draw, so it does not count
            found.append(mirostat.draw(row, float(chance)))
            mirostat.accept()
        return found

    first = Mirostat(version, tau=4.0, eta=0.1, temperature=1.0, n_vocab=2000)
    tokens = drawn(first, 0)
    weights = np.exp(rows.astype(np.float64))
    surprises = -np.log2(weights[np.arange(400), tokens] / weights.sum(1))
    assert 2.5 < surprises[100:].mean() < 7.5
    half = Mirostat(version, tau=4.0, eta=0.1, temperature=1.0, n_vocab=2000)
    for row, chance in zip(rows[:200], chances[:200], strict=True):
        half.draw(row, float(chance))
        half.accept()
    other = Mirostat(version, tau=4.0, eta=0.1, temperature=1.0, n_vocab=2000)
    other.mu = half.mu
    assert drawn(other, 200) == tokens[200:]


def test_mirostat_never_draws_what_is_banned():
    logits = np.full(50, -np.inf, np.float32)
    logits[7] = 1.0
    for version in (1, 2):
        mirostat = Mirostat(version, tau=5.0, eta=0.1, temperature=0.5, n_vocab=50)
        assert {mirostat.draw(logits, at) for at in (0.0, 0.5, 1 - 2**-53)} == {7}
