"""When a dead engine may be started again."""

from __future__ import annotations

from localrun.errors import EngineDied
from localrun.server.engines.breaker import DEATHS_TO_OPEN, EARLY_S, FIRST_DELAY_S, OPEN_S, Breaker

DEATH = EngineDied("it died")


def test_the_first_death_delays_nothing() -> None:
    breaker = Breaker()
    breaker.died(100.0, 0.0, DEATH)
    assert breaker.delay_s(100.0) == 0.0
    assert breaker.closed_for_s(100.0) == 0.0


def test_a_second_early_death_delays_the_next_start() -> None:
    breaker = Breaker()
    breaker.died(100.0, 5.0, DEATH)
    breaker.died(101.0, 0.0, DEATH)
    assert breaker.delay_s(101.0) == FIRST_DELAY_S
    assert breaker.delay_s(101.0 + FIRST_DELAY_S) == 0.0
    assert breaker.closed_for_s(101.0) == 0.0


def test_the_third_early_death_closes_the_door_for_a_while() -> None:
    breaker = Breaker()
    for second in range(DEATHS_TO_OPEN):
        breaker.died(100.0 + second, 0.0, DEATH)
    last_s = 100.0 + DEATHS_TO_OPEN - 1
    assert breaker.closed_for_s(last_s) == OPEN_S
    assert breaker.closed_for_s(last_s + OPEN_S) == 0.0
    assert breaker.last_error is DEATH


def test_after_the_door_opened_one_more_early_death_closes_it_again() -> None:
    breaker = Breaker()
    for _ in range(DEATHS_TO_OPEN):
        breaker.died(100.0, 0.0, DEATH)
    breaker.died(140.0, 1.0, DEATH)
    assert breaker.closed_for_s(140.0) == OPEN_S


def test_a_death_after_a_long_life_clears_the_count() -> None:
    breaker = Breaker()
    breaker.died(100.0, 0.0, DEATH)
    breaker.died(101.0, 0.0, DEATH)
    breaker.died(500.0, EARLY_S + 1, DEATH)
    breaker.died(501.0, 0.0, DEATH)
    assert breaker.closed_for_s(501.0) == 0.0
    assert breaker.delay_s(501.0) == 0.0
