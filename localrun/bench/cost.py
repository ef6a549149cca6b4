"""What a million tokens cost, from a price per hour, or from watts and a price per kilowatt-hour.

Pure. Says nothing about the price of the machine itself: a price per hour includes it, watts do not.
"""

from __future__ import annotations

from localrun.errors import BadRequest

_SECONDS_PER_HOUR = 3600.0


def price_per_hour(*, price_per_hour: float | None, watts: float | None, price_per_kwh: float | None) -> float | None:
    """The price of running for an hour, in whatever currency was given; None when nothing was.

    Raises BadRequest when both ways are given at once, or watts without a price per kilowatt-hour and the reverse.
    """
    if price_per_hour is not None:
        if watts is not None or price_per_kwh is not None:
            raise BadRequest("give --price-per-hour, or --watts and --price-per-kwh, not both", field="price_per_hour")
        return _not_negative(price_per_hour, "price_per_hour")
    if watts is None and price_per_kwh is None:
        return None
    if watts is None or price_per_kwh is None:
        raise BadRequest("--watts and --price-per-kwh go together", field="watts")
    return _not_negative(watts, "watts") / 1000.0 * _not_negative(price_per_kwh, "price_per_kwh")


def cost_per_million_tokens(hourly_price: float, tokens_per_s: float) -> float:
    """In the currency of `hourly_price`; infinite when nothing is generated."""
    if tokens_per_s <= 0:
        return float("inf")
    return hourly_price / (tokens_per_s * _SECONDS_PER_HOUR) * 1_000_000


def _not_negative(value: float, field: str) -> float:
    if not 0 <= value < float("inf"):
        raise BadRequest(f"{field} is {value:g}, which is no price or power", field=field)
    return value
