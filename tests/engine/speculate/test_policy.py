"""What drafts gain and lose over many steps, while the costs of rows are learned: in simulated time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from localrun.engine.speculate.choice import DraftLimits, DraftStream, RowCosts, choose

CPU = {1: 1.0, 2: 1.21, 4: 1.63, 8: 2.56, 12: 3.44, 16: 4.32}
GPU = {size: size**0.05 for size in CPU}
METAL = {size: size**0.97 for size in CPU}
LIMITS = DraftLimits(15, 32, 0.0, False)
PLAIN_S = 0.008


class Known(RowCosts):
    """Costs that need not be learned."""

    def __init__(self, costs: dict[int, float]) -> None:
        super().__init__()
        self._costs = costs

    def is_known(self, n_rows: int) -> bool:
        return True

    def is_stale(self, n_rows: int) -> bool:
        return False

    def ratio(self, n_rows: int, to: int) -> float:
        return self._costs[n_rows] / self._costs[to]


def speedup(
    machine: dict[int, float],
    *,
    share_copied: float,
    costs: RowCosts | None = None,
    first: float = 1.0,
    noise: float = 0.05,
    speed: Callable[[int], float] = lambda at: 1.0,
    n_tokens: int = 4000,
) -> float:
    """An answer of which a part is copied, 100 tokens at a time; elsewhere there are now and then short drafts that are
    seldom right. Steps of a new size take `first` times as long, which does not count."""
    costs, chance, now_s, spent_s, plain_s = costs or RowCosts(), random.Random(11), 1.0, 0.0, 0.0
    seen: set[int] = set()
    at = 0
    while at < n_tokens:
        is_copied = at % 100 < 100 * share_copied
        right = 0.97 if is_copied else 0.3
        chances = [right] * 15 if is_copied else [0.35] * 3 if chance.random() < 0.2 else []
        chosen = choose([DraftStream(0, chances)], costs, LIMITS)
        n_drafts = chosen.n_rows[0] if chosen is not None else 0
        step_s = PLAIN_S * speed(at) * machine[1 + n_drafts] * chance.lognormvariate(-(noise**2) / 2, noise)
        took_s = step_s * (1.0 if 1 + n_drafts in seen else first)
        seen.add(1 + n_drafts)
        now_s += took_s
        costs.observe(1 + n_drafts, took_s, now_s)
        spent_s += step_s
        n_given = 1
        while n_given <= min(n_drafts, len(chances)) and chance.random() < right:
            n_given += 1
        plain_s += n_given * PLAIN_S * speed(at)
        at += n_given
    return plain_s / spent_s


CASES = {
    "quiet": {},
    "noisy": {"noise": 0.3},
    "the first step of each size is held up": {"first": 100.0},
    "six times as slow now and then": {"speed": lambda at: 6.0 if at // 150 % 2 else 1.0},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("machine", [CPU, GPU, METAL], ids=["cpu", "gpu", "metal"])
def test_prose_is_not_slowed_down(machine: dict[int, float], case: str):
    assert speedup(machine, share_copied=0.0, **CASES[case]) > 0.98
    assert speedup(machine, share_copied=0.1, **CASES[case]) > 0.98


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("share_copied", [1.0, 0.5])
def test_copies_gain_most_of_what_they_could(machine: dict[int, float], case: str, share_copied: float):
    gained = speedup(machine, share_copied=share_copied, **CASES[case])
    possible = speedup(machine, share_copied=share_copied, costs=Known(machine), **CASES[case])
    assert gained - 1 > (possible - 1) * 2 / 3


def test_where_rows_cost_as_much_as_tokens_copies_lose_little():
    assert speedup(METAL, share_copied=1.0) > 0.97
