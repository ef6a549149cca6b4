"""The client's name and lane."""

from __future__ import annotations

from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.server.http import caller
from localrun.server.http.exchange import Exchange
from localrun.wire import Lane


def exchange(**headers: str) -> Exchange:
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": "http", "path": "/api/chat", "headers": raw, "client": ("127.0.0.1", 50000)}
    return Exchange(scope, None, None)  # type: ignore[arg-type]


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
    ask = caller.ask(exchange(x_localrun_client="me", x_localrun_lane="batch"), "tiny", keep_alive_s=5)
    assert (ask.model, ask.api, ask.client, ask.lane, ask.keep_alive_s) == ("tiny", "/api/chat", "me", Lane.BATCH, 5)
