"""Every spelling of keep_alive."""

from __future__ import annotations

import pytest

from localrun.errors import BadRequest
from localrun.server.http import keep_alive


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None), ("", None), (300, 300.0), (1.5, 1.5), (0, 0.0), (-1, -1.0), (-7.5, -1.0),
        ("5m", 300.0), ("1h30m", 5400.0), ("300ms", 0.3), ("1.5h", 5400.0), (".5s", 0.5), ("0", 0.0), ("0s", 0.0),
        ("-1", -1.0), ("-1m", -1.0), ("300", 300.0), ("+2s", 2.0), (" 10s ", 10.0), ("24h", 86400.0),
    ],
)  # fmt: skip
def test_spellings(value: float | str | None, seconds: float | None) -> None:
    assert keep_alive.seconds(value) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    "value", ["five minutes", "5 m", "5d", "m", "--1", "1h-30m", "5m!", "nan", "inf", "1e3", "9" * 400, "５m"]
)
def test_what_is_no_duration_names_the_field(value: str) -> None:
    with pytest.raises(BadRequest, match="keep_alive") as caught:
        keep_alive.seconds(value)
    assert caught.value.field == "keep_alive"
