"""Every answer names its request, errors of every layer included; and what a gateway calls it is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.daemon import Daemon, running_daemon

CLAUDE: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
CHAT: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


def named(answer: httpx2.Response, header: str) -> str:
    name = answer.headers[header]
    assert name.startswith("req_")
    assert len(answer.headers.get_list(header)) == 1
    return str(name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "header"),
    [("/v1/messages", CLAUDE, "request-id"), ("/v1/chat/completions", CHAT, "x-request-id")],
)
def test_what_was_generated_is_named_as_everywhere(
    daemon: Daemon, path: str, body: dict[str, Any], header: str, stream: bool
) -> None:
    answer = daemon.post(path, body | {"stream": stream})
    assert answer.status_code == 200, answer.text
    assert named(answer, header) == answer.headers["x-localrun-request"]


def test_two_requests_have_two_names(daemon: Daemon) -> None:
    names = {named(daemon.post("/v1/messages/count_tokens", CLAUDE), "request-id") for _ in range(3)}
    assert len(names) == 3
    assert named(daemon.http.get("/v1/models"), "x-request-id")


@pytest.mark.parametrize(
    ("body", "headers", "path", "status"),
    [
        (CLAUDE | {"max_tokens": "many"}, {}, "/v1/messages", 400),
        (CLAUDE | {"model": "none-such"}, {}, "/v1/messages", 404),
        (CLAUDE, {"origin": "https://elsewhere.example"}, "/v1/messages", 403),
        (CLAUDE, {"content-type": "text/plain", "origin": "http://localhost"}, "/v1/messages", 415),
        (CLAUDE, {}, "/v1/messages/none-such", 404),
    ],
)
def test_errors_of_every_layer_have_it_in_header_and_body(
    daemon: Daemon, body: dict[str, Any], headers: dict[str, str], path: str, status: int
) -> None:
    content = json.dumps(body).encode()
    answer = daemon.http.post(path, content=content, headers={"content-type": "application/json"} | headers)
    assert answer.status_code == status
    assert answer.json()["request_id"] == named(answer, "request-id")
    other = daemon.http.post(
        path.replace("/messages", "/completions"),
        content=content,
        headers={"content-type": "application/json"} | headers,
    )
    assert other.status_code in (400, status)
    assert named(other, "x-request-id")
    assert "request_id" not in other.json()


@pytest.mark.parametrize(
    ("path", "status"),
    [("/api/version", 200), ("/api/nothing", 404), ("/api/chat", 400), ("/completion", 400), ("/nowhere", 404),
     ("/localrun/v1/requests/none", 404)],
)  # fmt: skip
def test_other_families_have_one_as_well(daemon: Daemon, path: str, status: int) -> None:
    answer = daemon.post(path, {}) if status == 400 else daemon.http.get(path)
    assert answer.status_code == status, answer.text
    assert named(answer, "x-request-id")


def rows(daemon: Daemon) -> list[dict[str, Any]]:
    return list(daemon.http.get("/localrun/v1/requests").json()["requests"])


@pytest.mark.parametrize("header", ["X-Request-Id", "X-Client-Request-Id"])
def test_the_ids_of_a_gateway_are_kept_beside_our_own(daemon: Daemon, header: str) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {header: "my-42", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    answer = daemon.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    (row,) = [row for row in rows(daemon) if row["id"] == named(answer, "x-request-id")]
    assert (row["client_id"], row["trace_id"]) == ("my-42", trace)


@pytest.mark.parametrize("unsafe", ["a b", "x" * 129, 'a"b', ""])
def test_an_id_that_could_not_stand_in_a_log_is_none(daemon: Daemon, unsafe: str) -> None:
    headers = {"X-Request-Id": unsafe, "traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"}
    answer = daemon.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    (row,) = [row for row in rows(daemon) if row["id"] == named(answer, "x-request-id")]
    assert (row["client_id"], row["trace_id"]) == ("", "")
