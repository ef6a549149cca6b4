"""How many replicas an app is given, over traces of loads: no clock, no cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.cluster.description import DOWN_AFTER_S, TARGET_WAIT_S, UP_AFTER_S, Load, Scale, Scaler

IDLE = Load(n_slots=4, n_running=0, n_queued=0, wait_s=None)
BUSY = Load(n_slots=4, n_running=4, n_queued=0, wait_s=None)
ONE_TO_EIGHT = Scale(1, 8)


def behind(wait_s: float | None) -> Load:
    return Load(n_slots=4, n_running=4, n_queued=3, wait_s=wait_s)


def after(scaler: Scaler, seconds: float, n: int, loads: list[Load], scale: Scale = ONE_TO_EIGHT) -> int:
    """What is wanted when it has been like that for so long, looked at every second as a bridge does."""
    for second in range(int(seconds) + 1):
        wanted = scaler.wanted(scale, n, loads, after.now_s + second)  # type: ignore[attr-defined]
    after.now_s += seconds + 1  # type: ignore[attr-defined]
    return wanted


after.now_s = 1000.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("n", "waits_s", "wanted"),
    [
        (1, [3.0], 2),
        (1, [60.0], 2),  # at most twice as many
        (3, [3.0, 3.0, 3.0], 5),
        (3, [9.0, 0.0, 0.0], 5),  # what waits at one could be spread
        (3, [2.0, 2.0, 2.0], 3),
        (2, [None, None], 4),
        (6, [60.0] * 6, 8),
    ],
)
def test_more_as_long_as_work_waits(n, waits_s, wanted):
    loads = [behind(wait_s) for wait_s in waits_s]
    scaler = Scaler()
    assert after(scaler, UP_AFTER_S - 1, n, loads) == n
    assert after(scaler, 1, n, loads) == wanted


def test_long_prompts_count_and_not_their_number():
    few, many = [Load(4, 4, 2, 40.0)], [Load(4, 4, 20, TARGET_WAIT_S / 2)]
    assert after(Scaler(), UP_AFTER_S, 1, few) == 2
    assert after(Scaler(), UP_AFTER_S, 1, many) == 1


def test_nothing_is_added_while_replicas_start():
    scaler = Scaler()
    assert after(scaler, 20 * UP_AFTER_S, 4, [behind(60.0)]) == 4
    assert after(scaler, UP_AFTER_S, 4, [behind(60.0)] * 4) == 8


def test_without_any_load_starting_replicas_stay_as_they_are():
    assert after(Scaler(), DOWN_AFTER_S - 1, 2, [], Scale(2, 10)) == 2
    assert after(Scaler(), 10 * DOWN_AFTER_S, 2, [], Scale(2, 10)) == 2


def test_the_first_one_may_take_its_time_to_start():
    assert after(Scaler(), 10 * DOWN_AFTER_S, 1, [], Scale(0, 4)) == 1


def test_a_wait_that_ends_in_between_begins_anew():
    scaler = Scaler()
    after(scaler, UP_AFTER_S - 2, 1, [behind(60.0)])
    after(scaler, 1, 1, [BUSY])
    assert after(scaler, UP_AFTER_S - 2, 1, [behind(60.0)]) == 1


def test_one_less_when_the_others_could_do_it():
    scaler = Scaler()
    half = [BUSY, BUSY, IDLE, IDLE]
    assert after(scaler, DOWN_AFTER_S - 1, 4, half) == 4
    assert after(scaler, 1, 4, half) == 3
    assert after(scaler, DOWN_AFTER_S, 3, [BUSY, BUSY, IDLE]) == 2
    assert after(scaler, 3 * DOWN_AFTER_S, 2, [BUSY, BUSY]) == 2


def test_one_that_never_came_is_taken_back():
    assert after(Scaler(), DOWN_AFTER_S, 3, [BUSY, BUSY]) == 2


@pytest.mark.parametrize(("least", "wanted"), [(0, 0), (1, 1)])
def test_none_at_all_only_where_that_may_be(least, wanted):
    assert after(Scaler(), DOWN_AFTER_S, 1, [IDLE], Scale(least, 4)) == wanted
    assert after(Scaler(), DOWN_AFTER_S, 1, [Load(4, 1, 0, None)], Scale(least, 4)) == 1


def test_a_queue_keeps_all():
    assert after(Scaler(), 2 * DOWN_AFTER_S, 2, [Load(4, 0, 1, 0.1), IDLE]) == 2


@pytest.mark.parametrize(("n", "wanted"), [(1, 3), (9, 5), (4, 4)])
def test_other_bounds_hold_at_once(n, wanted):
    assert Scaler().wanted(Scale(3, 5), n, [BUSY] * n, 5.0) == wanted


LOADS = st.lists(
    st.builds(
        Load, n_slots=st.just(4), n_running=st.integers(0, 4), n_queued=st.integers(0, 9),
        wait_s=st.none() | st.floats(0, 1e6),
    ),
    max_size=9,
)  # fmt: skip


@given(st.lists(st.tuples(LOADS, st.integers(1, 400)), max_size=40), st.integers(0, 4), st.integers(0, 6))
def test_whatever_comes_the_bounds_hold_and_steps_are_small(trace, least, more):
    scale, scaler, n, now_s = Scale(least, least + more), Scaler(), max(1, least), 10.0
    for loads, seconds in trace:
        now_s += seconds
        wanted = scaler.wanted(scale, n, loads, now_s)
        assert scale.within(wanted) == wanted
        assert n - 1 <= wanted <= max(2 * n, 1) or n != scale.within(n)
        n = wanted
