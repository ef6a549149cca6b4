"""How many rows everybody gets."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from localrun.engine.speculate.choice import (
    MOST_SLOWDOWN,
    MOST_TARGETS,
    DraftChoice,
    DraftLimits,
    DraftStream,
    RowCosts,
    choose,
    passes,
)


class Costs(RowCosts):
    """Steps of n rows take n ** slope times as long as those of one, which take `plain_s`."""

    def __init__(self, slope: float, plain_s: float = 0.005) -> None:
        self._slope, self._plain_s = slope, plain_s

    def ratio(self, n_rows: int, to: int) -> float:
        return (n_rows / to) ** self._slope

    def is_known(self, n_rows: int) -> bool:
        return True

    def is_stale(self, n_rows: int) -> bool:
        return False

    def seconds(self, n_rows: int) -> float:
        return self._plain_s * n_rows**self._slope


CPU, GPU, METAL = Costs(0.52), Costs(0.05), Costs(1.0)


def limits(*, is_even: bool = False, target_s: float = 0.0, most_rows: int = 32, most_each: int = 15) -> DraftLimits:
    return DraftLimits(most_each, most_rows, target_s, is_even)


def streams(*chances: float) -> list[DraftStream]:
    return [DraftStream(seq, [chance] * 15 if chance else []) for seq, chance in enumerate(chances)]


def rows(chosen: DraftChoice | None) -> tuple[int, ...]:
    return () if chosen is None else chosen.n_rows


def test_the_surer_a_draft_the_longer():
    chosen = [sum(rows(choose(streams(chance), CPU, limits()))) for chance in (0.2, 0.6, 0.8, 0.97)]
    assert chosen == sorted(chosen)
    assert chosen[0] == 0
    assert chosen[-1] == 15


def test_where_rows_cost_as_much_as_tokens_nothing_is_drafted():
    assert choose(streams(0.97), METAL, limits()) is None
    assert choose(streams(0.9, 0.9, 0.9, 0.9), METAL, limits(is_even=True)) is None


@pytest.mark.parametrize("n_beside", [1, 3])
def test_a_stream_drafts_no_more_than_those_in_steps_of_their_own_can_wait_for(n_beside: int):
    beside = replace(limits(), n_beside=n_beside)
    assert choose(streams(0.97), CPU, beside) is None  # two rows take 1.43 times as long, for 1.97 tokens
    chosen = choose(streams(0.97), GPU, beside)
    assert chosen is not None
    assert 1 < chosen.ratio <= MOST_SLOWDOWN


def test_where_rows_cost_nothing_doubtful_drafts_are_worth_them():
    assert sum(rows(choose(streams(0.3), GPU, limits()))) > 0


def test_no_drafts_no_rows():
    assert choose(streams(0, 0, 0), GPU, limits()) is None


@pytest.mark.parametrize("is_even", [False, True])
def test_the_sure_ones_get_the_rows(is_even):
    chosen = choose(streams(0.95, 0, 0.2, 0.95), GPU, limits(is_even=is_even, most_rows=12))
    assert chosen is not None
    assert chosen.n_rows[0] >= 3 <= chosen.n_rows[3]
    assert sum(chosen.n_rows) <= 12


def test_split_streams_have_equal_rows_or_a_second_pass():
    for chances in itertools.product((0, 0.8, 0.97), repeat=4):
        chosen = choose(streams(*chances), CPU, limits(is_even=True))
        if chosen is not None:
            assert len(set(chosen.n_rows) - {0}) == 1
            assert all(chosen.n_rows) or all(
                bool(n) == bool(chance) for n, chance in zip(chosen.n_rows, chances, strict=True)
            )


def test_passes_of_neighbours_are_one():
    assert passes([4, 4, 0, 4], streams(1, 1, 0, 1)) == [8, 4]
    far = [DraftStream(0, [1.0]), DraftStream(2, [1.0])]
    assert passes([3, 3], far) == [3, 3]


def test_nobody_is_held_up_for_the_sake_of_others():
    for n_others in (1, 3, 7):
        chosen = choose(streams(0.99, *[0] * n_others), CPU, limits())
        assert chosen is None or chosen.ratio <= MOST_SLOWDOWN


def test_a_stream_keeps_its_latency_target():
    slow = Costs(0.3, plain_s=0.04)
    assert choose(streams(0.97, 0), slow, limits()) is not None
    chosen = choose(streams(0.97, 0), slow, limits(target_s=0.055))
    assert chosen is None or slow.seconds(2) * chosen.ratio <= 0.055


def test_a_step_is_no_longer_than_a_few_tokens_may_take_however_many_it_gives():
    slow = Costs(0.9, plain_s=0.04)
    sure = [DraftStream(0, [0.999] * 15)]
    assert sum(rows(choose(sure, slow, limits()))) == 15
    assert sum(rows(choose(sure, slow, limits(target_s=0.14)))) == 15
    chosen = choose(sure, slow, limits(target_s=0.045))
    assert chosen is not None
    assert 0 < slow.seconds(1) * chosen.ratio <= MOST_TARGETS * 0.045


def test_a_step_of_several_streams_is_no_longer_than_a_token_may_take():
    slow = Costs(0.9, plain_s=0.02)
    sure = [DraftStream(index, [0.999] * 15) for index in range(2)]
    chosen = choose(sure, slow, limits(target_s=0.14))
    assert chosen is not None
    assert 0.07 < slow.seconds(2) * chosen.ratio <= 0.14
    # Where even a plain step takes longer, it may take half as long again.
    chosen = choose(sure, Costs(0.1, plain_s=0.2), limits(target_s=0.14))
    assert chosen is not None
    assert 1 < chosen.ratio <= MOST_SLOWDOWN


def test_limits_are_kept():
    for most_rows, most_each in itertools.product((1, 3, 10), (1, 2, 15)):
        for is_even in (False, True):
            chosen = choose(streams(0.97, 0.97), GPU, limits(is_even=is_even, most_rows=most_rows, most_each=most_each))
            if chosen is not None:
                assert max(chosen.n_rows) <= most_each
                assert sum(chosen.n_rows) <= most_rows


def test_a_draft_that_takes_long_to_compute_has_to_gain_more():
    drawn = [DraftStream(0, [0.8] * 15, is_drawn=True)]
    assert choose(drawn, GPU, DraftLimits(15, 32, 0.0, False, draft_s=0.0001)) is not None
    assert choose(drawn, GPU, DraftLimits(15, 32, 0.0, False, draft_s=0.05)) is None
