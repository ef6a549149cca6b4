"""The client's name, its lane, latency and deadline."""

from __future__ import annotations

from typing import Any

import pytest

from localrun.config import latency_target_s
from localrun.errors import BadRequest
from localrun.server.http import caller
from localrun.server.http.caller import keep_alive_s
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Shape
from localrun.server.http.fields import ServiceFields
from localrun.wire import Lane


def exchange(**headers: str) -> Exchange:
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": "http", "path": "/api/chat", "headers": raw, "client": ("127.0.0.1", 50000)}
    return Exchange(scope, None, None, Shape.OLLAMA)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({}, "127.0.0.1"),
        ({"user_agent": "ollama-python/0.6.3 (x86_64 linux) Python/3.11"}, "ollama-python"),
        ({"user_agent": "OpenAI/Python 3.52.0"}, "OpenAI"),
        ({"user_agent": "curl/8.5.0", "x_localrun_client": "my editor"}, "my editor"),
        ({"user_agent": "\x01\x02"}, "127.0.0.1"),
        ({"x_localrun_client": "a\x00b\x1b[31mc\xe9"}, "a b [31mc"),
        ({"x_localrun_client": "x" * 500}, "x" * 64),
    ],
)
def test_the_client_s_name(headers: dict[str, str], name: str) -> None:
    assert caller.client(exchange(**headers)) == name


def test_lanes() -> None:
    assert caller.lane(exchange()) is Lane.DEFAULT
    assert caller.lane(exchange(x_localrun_lane="Interactive ")) is Lane.INTERACTIVE
    with pytest.raises(BadRequest, match=r"X-Localrun-Lane.*interactive, default, batch"):
        caller.lane(exchange(x_localrun_lane="first"))


def test_what_is_asked_of_the_runtime() -> None:
    ask = caller.ask(exchange(x_localrun_client="me", x_localrun_lane="batch"), "tiny", ServiceFields(keep_alive=5))
    assert (ask.model, ask.api, ask.client, ask.lane, ask.keep_alive_s) == ("tiny", "/api/chat", "me", Lane.BATCH, 5)


def test_a_lane_in_the_body_counts_before_the_header() -> None:
    asked = exchange(x_localrun_lane="batch")
    assert caller.lane(asked, "interactive") is Lane.INTERACTIVE
    with pytest.raises(BadRequest, match=r"^lane: 'first' is not a lane; use interactive, default, batch") as caught:
        caller.lane(asked, "first")
    assert caught.value.field == "lane"


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("throughput", 0.8), (" Throughput", 0.8), ("40", 0.04), (40, 0.04), (12.5, 0.0125), ("", None)],
)
def test_latency(said: str | float, seconds: float | None) -> None:
    assert caller.target_itl_s(exchange(), said) == seconds
    assert caller.target_itl_s(exchange(x_localrun_latency=str(said))) == seconds


def test_modes_are_the_setting_s() -> None:
    for mode in ("interactive", "balanced"):
        assert caller.target_itl_s(exchange(), mode) == latency_target_s(mode) > 0
    assert caller.target_itl_s(exchange()) is None


@pytest.mark.parametrize("said", ["fast", "-1", "0", "nan", "inf", "1e9", "x" * 1000])
def test_a_latency_that_is_none(said: str) -> None:
    with pytest.raises(BadRequest, match=r"^latency: .*interactive, balanced, throughput.*milliseconds") as caught:
        caller.target_itl_s(exchange(), said)
    assert caught.value.field == "latency"
    assert len(caught.value.message) < 200
    with pytest.raises(BadRequest, match=r"^X-Localrun-Latency: "):
        caller.target_itl_s(exchange(x_localrun_latency=said))


def test_deadlines() -> None:
    assert caller.deadline_s(exchange()) is None
    assert caller.deadline_s(exchange(x_localrun_deadline="2.5")) == 2.5
    assert caller.deadline_s(exchange(x_localrun_deadline="2.5"), 4) == 4.0
    for wrong in (0.0, -1.0, 1e9):
        with pytest.raises(BadRequest, match=r"^deadline_s: .*number of seconds up to 86400"):
            caller.deadline_s(exchange(), wrong)
    for text in ("soon", "nan", "inf", "0"):
        with pytest.raises(BadRequest, match=r"^X-Localrun-Deadline: "):
            caller.deadline_s(exchange(x_localrun_deadline=text))


def test_what_the_body_asks_for_is_asked_of_the_runtime() -> None:
    fields = ServiceFields(lane="batch", latency=30, deadline_s=9)
    ask = caller.ask(exchange(), "tiny", fields)
    assert (ask.lane, ask.target_itl_s, ask.deadline_s) == (Lane.BATCH, 0.03, 9.0)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None), ("", None), (300, 300.0), (1.5, 1.5), (0, 0.0), (-1, -1.0), (-7.5, -1.0),
        ("5m", 300.0), ("1h30m", 5400.0), ("300ms", 0.3), ("1.5h", 5400.0), (".5s", 0.5), ("0", 0.0), ("0s", 0.0),
        ("-1", -1.0), ("-1m", -1.0), ("300", 300.0), ("+2s", 2.0), (" 10s ", 10.0), ("24h", 86400.0),
    ],
)  # fmt: skip
def test_spellings(value: float | str | None, seconds: float | None) -> None:
    assert keep_alive_s(value) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    "value", ["five minutes", "5 m", "5d", "m", "--1", "1h-30m", "5m!", "nan", "inf", "1e3", "9" * 400, "５m"]
)
def test_what_is_no_duration_names_the_field(value: str) -> None:
    with pytest.raises(BadRequest, match="keep_alive") as caught:
        keep_alive_s(value)
    assert caught.value.field == "keep_alive"
