from __future__ import annotations

import math

import pytest

from localrun.bench.cost import cost_per_million_tokens, price_per_hour
from localrun.errors import BadRequest


def price(**given: float) -> float | None:
    values: dict[str, float | None] = {"price_per_hour": None, "watts": None, "price_per_kwh": None}
    return price_per_hour(**(values | given))


def test_a_million_tokens_at_a_thousand_a_second_take_a_thousand_seconds():
    assert cost_per_million_tokens(3.6, 1000.0) == pytest.approx(1.0)


def test_nothing_generated_costs_without_end():
    assert math.isinf(cost_per_million_tokens(1.0, 0.0))


def test_a_price_per_hour_is_taken_as_it_is():
    assert price(price_per_hour=2.5) == 2.5
    assert price(price_per_hour=0.0) == 0.0


def test_watts_are_thousandths_of_kilowatts():
    assert price(watts=500.0, price_per_kwh=0.4) == pytest.approx(0.2)


def test_without_any_price_there_is_none():
    assert price() is None


@pytest.mark.parametrize("given", [{"watts": 60.0}, {"price_per_kwh": 0.3}])
def test_half_of_an_energy_price_is_refused(given: dict[str, float]):
    with pytest.raises(BadRequest, match="go together"):
        price(**given)


@pytest.mark.parametrize("other", [{"watts": 60.0}, {"price_per_kwh": 0.3}])
def test_two_kinds_of_prices_are_refused(other: dict[str, float]):
    with pytest.raises(BadRequest, match="not both"):
        price(price_per_hour=1.0, **other)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_a_price_that_is_none_is_refused(value: float):
    with pytest.raises(BadRequest):
        price(price_per_hour=value)
