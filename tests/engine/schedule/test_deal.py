from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localrun.engine.schedule.policy import GRANULE_ROWS, Demand, share_rows

wants = st.lists(st.builds(Demand, st.integers(1, 500), st.sampled_from("abc"), st.integers(-1, 2)), max_size=12)


@given(wants, st.integers(-5, 1000))
def test_all_of_the_room_is_given_while_somebody_wants_it(given_wants: list[Demand], room: int):
    dealt = share_rows(given_wants, room)
    assert sum(dealt) == min(sum(want.n_rows for want in given_wants), max(0, room))
    assert all(0 <= share <= want.n_rows for share, want in zip(dealt, given_wants, strict=True))


@given(st.lists(st.integers(1, 500), min_size=2, max_size=12), st.integers(0, 1000))
def test_of_one_client_the_least_to_do_comes_first_and_the_most_is_not_forgotten(rows: list[int], room: int):
    dealt = share_rows([Demand(n_rows, "me", 1) for n_rows in rows], room)
    shortest = rows.index(min(rows))
    assert dealt[shortest] >= min(rows[shortest], room - room // 4 - GRANULE_ROWS) // GRANULE_ROWS * GRANULE_ROWS
    if max(rows) > 4 * GRANULE_ROWS:
        assert dealt[rows.index(max(rows))] >= min(GRANULE_ROWS, room) - 1 or room < GRANULE_ROWS


def test_equal_short_prompts_are_done_one_after_another():
    assert share_rows([Demand(50, "me", 1)] * 5, 128) == [50, 50, 28, 0, 0]


def test_long_prompts_share_a_quarter():
    assert share_rows([Demand(1000, "me", 1), Demand(2000, "me", 1)], 512) == [448, 64]


@given(wants, st.integers(1, 1000))
def test_all_but_one_share_of_those_cut_short_are_whole_granules(given_wants: list[Demand], room: int):
    dealt = share_rows(given_wants, room)
    pairs = zip(dealt, given_wants, strict=True)
    cut = [share for share, want in pairs if GRANULE_ROWS <= share < want.n_rows]
    assert sum(share % GRANULE_ROWS > 0 for share in cut) <= 1


def test_a_client_gets_no_more_by_asking_twice():
    hog = [Demand(1000, "hog", 1)] * 3
    dealt = share_rows([*hog, Demand(1000, "mouse", 1)], 384)
    assert (sum(dealt[:3]), dealt[3]) == (192, 192)


def test_a_short_prompt_is_not_stuck_behind_a_long_one():
    assert share_rows([Demand(2400, "a", 1), Demand(20, "b", 1)], 64) == [44, 20]


def test_higher_lanes_get_more_but_not_all():
    by_lane = [Demand(1000, "a", 0), Demand(1000, "b", 1), Demand(1000, "c", 2)]
    assert share_rows(by_lane, 448) == [256, 128, 64]
    assert share_rows([Demand(10, "a", 0), *by_lane[1:]], 448) == [10, 288, 150]
