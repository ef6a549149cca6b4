"""What is learned of the cost of rows."""

from __future__ import annotations

import random

import pytest

from localrun.engine.speculate.choice import DepthCosts, RowCosts

STEPS_S = {1: 5.0, 2: 8.5, 4: 11.0, 8: 15.0, 16: 21.0}
STEPS_S_AS_EXPECTED = {n_rows: seconds * 1e-3 for n_rows, seconds in STEPS_S.items()}


def learned(steps: list[int], *, speed=lambda at: 1.0, noise: float = 0.05, costs: RowCosts | None = None) -> RowCosts:
    costs, chance, now_s = costs or RowCosts(), random.Random(3), 1.0
    for at, n_rows in enumerate(steps):
        seconds = STEPS_S[n_rows] * 1e-3 * speed(at) * (1 + noise * chance.random())
        now_s += seconds
        costs.observe(n_rows, seconds, now_s)
    return costs


def mixed(n_steps: int) -> list[int]:
    return random.Random(5).choices([1, 1, 1, 2, 4, 8, 16], k=n_steps)


def test_ratios_are_those_of_the_steps():
    costs = learned(mixed(300))
    for n_rows, seconds in STEPS_S.items():
        assert costs.ratio(n_rows, 1) == pytest.approx(seconds / 5, rel=0.1)
    assert costs.seconds(8) == pytest.approx(15e-3, rel=0.1)


def test_a_machine_that_gets_slower_changes_no_ratio():
    costs = learned(mixed(300), speed=lambda at: 6.0 if at > 150 else 1.0)
    for n_rows, seconds in STEPS_S.items():
        assert costs.ratio(n_rows, 1) == pytest.approx(seconds / 5, rel=0.15)
    assert costs.seconds(1) == pytest.approx(30e-3, rel=0.2)


def test_a_step_that_something_else_held_up_is_soon_forgotten():
    costs = learned([1] * 20)
    costs.observe(8, 0.5, 0.9)
    learned([1, 8] * 4, costs=costs)
    assert costs.ratio(8, 1) < 4


@pytest.mark.parametrize("held_up", [2, 8, 16])
def test_a_size_whose_first_step_was_held_up_is_tried_again_soon(held_up: int):
    """Its graph is built then, its kernels are loaded: what comes after it is not to be measured by that."""
    costs = learned([1])
    learned([held_up], costs=costs, speed=lambda at: 100.0)
    learned([1] * 60, costs=costs)
    assert costs.ratio(held_up, 1) < STEPS_S[held_up] / 5 * 1.2
    assert costs.measured(16, 1) < 12


def test_a_plain_step_that_was_held_up_makes_no_other_cheap():
    costs = learned([1, 1])
    learned([1], costs=costs, speed=lambda at: 100.0)
    learned([8], costs=costs)
    assert costs.ratio(8, 1) > 1.5


def test_what_was_never_measured_is_guessed_from_its_neighbours():
    costs = learned([1, 4, 1, 4] * 10, noise=0.0)
    assert 1 < costs.ratio(2, 1) < costs.ratio(4, 1) < costs.ratio(8, 1)


def test_rows_of_several_streams_are_expected_to_be_no_tile():
    costs = DepthCosts()
    of_one, of_several = costs.at(1000), costs.at(1000, is_even=True)
    for table in (of_one, of_several):
        for at_s, (n_rows, seconds) in enumerate(((4, 0.1), (16, 0.32), (4, 0.1), (16, 0.32))):
            table.observe(n_rows, seconds, float(at_s) / 2)
    assert of_several.measured(64, to=4) > 1.4 * of_one.measured(64, to=4)
    assert of_several.heir().measured(64, to=4) == pytest.approx(of_several.measured(64, to=4))


def test_what_was_too_dear_long_ago_is_hoped_to_be_cheaper_now():
    costs = learned([1, 8] * 10, noise=0.0)
    measured = costs.ratio(8, 1)
    hopes = []
    for _ in range(3):
        learned([1] * 200, costs=costs, noise=0.0)
        hopes.append(costs.ratio(8, 1))
    assert measured > hopes[0] > hopes[1] > hopes[2] > measured / 3


def test_hope_that_was_disappointed_takes_longer_to_come_back():
    costs, waits = learned([1, 8] * 10, noise=0.0), []
    for _ in range(6):
        n_steps = 0
        while costs.ratio(8, 1) > 0.8 * costs.measured(8, 1):
            learned([1], costs=costs, noise=0.0)
            n_steps += 1
        waits.append(n_steps)
        learned([8], costs=costs, noise=0.0)
    assert waits == sorted(waits)
    assert waits[0] < 150 < 1000 < waits[-1] < 4000


def test_a_size_is_known_though_nothing_was_computed_right_before_it():
    costs = learned([1, 1])
    for at in range(3):
        costs.observe(4, 0.011, 100.0 + 0.011 * at)
    assert costs.is_known(4)
    learned([1, 4] * 3, costs=costs)
    assert costs.ratio(4, 1) == pytest.approx(2.2, rel=0.15)


def test_what_rows_cost_is_learned_anew_at_each_depth_beginning_with_what_is_known():
    depths = DepthCosts()
    shallow, deep = {1: 10.0, 8: 40.0, 64: 200.0}, {1: 28.0, 8: 160.0, 64: 350.0}
    at_s = 0.0
    for n_tokens, took in ((100, shallow), (1440, deep)):
        for _ in range(6):
            for n_rows, ms in took.items():
                at_s += ms / 1000
                depths.at(n_tokens).observe(n_rows, ms / 1000, at_s)
            if n_tokens == 1440 and _ == 0:
                first = depths.at(1440).measured(8, 1)
    assert first == pytest.approx(160 / 28, rel=0.25), "the first steps count for much"
    for n_tokens, took in ((0, shallow), (255, shallow), (1024, deep), (2047, deep)):
        for n_rows, ms in took.items():
            assert depths.at(n_tokens).measured(n_rows, 1) == pytest.approx(ms / took[1], rel=0.1)
    assert depths.at(3000).measured(8, 1) == pytest.approx(160 / 28, rel=0.1), "as the nearest that is known"
    assert depths.at(300).measured(8, 1) == pytest.approx(4.0, rel=0.1)


def test_a_deeper_table_begins_with_what_its_rows_attend_over_more():
    depths = DepthCosts()
    learned([1, 16] * 8, costs=depths.at(100))
    known = depths.at(100)
    deep = depths.at(5000, attend_s=lambda: 1e-6)
    more_s = (4096 - 128) * 1e-6  # from where one table begins to where the other one does
    for n_rows in (1, 16):
        assert deep.seconds(n_rows) == pytest.approx(known.seconds(n_rows) + n_rows * more_s)
    assert deep.ratio(16, 1) > 1.5 * known.ratio(16, 1)
    # Shallower again, rows are as cheap as they were.
    assert depths.at(0).ratio(16, 1) == pytest.approx(known.ratio(16, 1))


def drafting(costs: RowCosts, n_steps: int, seconds_of: dict[int, float], *, now_s: float = 50.0) -> list[int]:
    """The sizes of steps that are computed if sixteen rows are, whenever one row has not to be measured again."""
    sizes = []
    for _ in range(n_steps):
        n_rows = 1 if costs.is_stale(1) else 16
        now_s += seconds_of[n_rows]
        costs.observe(n_rows, seconds_of[n_rows], now_s)
        sizes.append(n_rows)
    return sizes


def test_a_ratio_that_depth_made_wrong_is_found_out_though_nothing_else_is_computed():
    costs = learned([1, 16] * 8)
    drafting(costs, 200, {1: 6e-3, 16: 90e-3})
    assert costs.ratio(16, 1) == pytest.approx(15, rel=0.2)
    assert costs.seconds(1) == pytest.approx(6e-3, rel=0.2)


def test_what_is_as_expected_is_measured_more_and_more_seldom():
    costs = learned([1, 16] * 8, noise=0)
    sizes = drafting(costs, 1000, STEPS_S_AS_EXPECTED)
    began, ended = sizes[:100].count(1), sizes[-100:].count(1)
    assert began > ended > 0
    assert ended * STEPS_S_AS_EXPECTED[1] < 0.01 * sum(STEPS_S_AS_EXPECTED[n_rows] for n_rows in sizes[-100:])


def test_the_first_step_at_a_new_depth_is_plain():
    depths = DepthCosts()
    learned([1, 16] * 8, costs=depths.at(10))
    assert not depths.at(10).is_stale(1)
    assert depths.at(300).is_stale(1)
