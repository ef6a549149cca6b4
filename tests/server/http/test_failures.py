"""One error, three shapes."""

from __future__ import annotations

import errno
import json
import os

import pytest

from localrun import errors
from localrun.server.http import failures
from localrun.server.http.failures import Shape
from tests.says import says


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/", Shape.NATIVE),
        ("/api/chat", Shape.OLLAMA),
        ("/v1/models", Shape.OPENAI),
        ("/v1/messages", Shape.ANTHROPIC),
        ("/v1/messages/count_tokens", Shape.ANTHROPIC),
        ("/v1/messagesx", Shape.OPENAI),
        ("/v1", Shape.OPENAI),
        ("/v10", Shape.NATIVE),
        ("/apiary", Shape.NATIVE),
        ("/localrun/v1/requests", Shape.NATIVE),
    ],
)
def test_the_path_decides_the_shape(path: str, shape: Shape) -> None:
    assert failures.shape_of(path) is shape


def test_the_three_shapes() -> None:
    error = errors.BadRequest("top_p: must be at most 1", field="top_p")
    assert json.loads(failures.body(error, Shape.OLLAMA)) == {"error": "top_p: must be at most 1"}
    assert json.loads(failures.body(error, Shape.OPENAI)) == {
        "error": {
            "message": "top_p: must be at most 1",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": "bad_request",
        }
    }
    assert json.loads(failures.body(error, Shape.NATIVE)) == {
        "error": {"code": "bad_request", "message": "top_p: must be at most 1", "field": "top_p"}
    }


@pytest.mark.parametrize(
    ("error", "type_"),
    [
        (errors.ModelNotFound("x"), "not_found_error"),
        (errors.QueueFull("full", retry_after_s=3), "rate_limit_error"),
        (errors.EngineDied("gone"), "api_error"),
        (errors.ContextExceeded(9, 8), "invalid_request_error"),
    ],
)
def test_openai_types(error: errors.LocalrunError, type_: str) -> None:
    assert json.loads(failures.body(error, Shape.OPENAI))["error"]["type"] == type_


def test_a_full_queue_says_when_to_come_back() -> None:
    headers = dict(failures.headers(errors.QueueFull("full", retry_after_s=2.2)))
    assert headers[b"retry-after"] == b"3"
    assert headers[b"x-localrun-error"] == b"queue_full"


def test_a_message_that_quotes_half_a_character_still_has_a_body() -> None:
    assert json.loads(failures.body(errors.BadRequest("bad \udc80"), Shape.OLLAMA))


def test_the_last_event_of_a_broken_stream() -> None:
    error = errors.EngineDied("the engine is gone")
    line = failures.stream_event(error, Shape.OLLAMA)
    assert line.endswith(b"}\n")
    assert json.loads(line) == {"error": "the engine is gone", "code": "engine_died"}
    event = failures.stream_event(error, Shape.OPENAI)
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert json.loads(event[6:])["error"]["code"] == "engine_died"


@pytest.mark.parametrize(
    ("error", "type_"),
    [
        (errors.BadRequest("x"), "invalid_request_error"),
        (errors.Unauthorized("x"), "authentication_error"),
        (errors.Forbidden("x"), "permission_error"),
        (errors.ModelNotFound("x"), "not_found_error"),
        (errors.TooLarge("x"), "request_too_large"),
        (errors.QueueFull("x", retry_after_s=1), "rate_limit_error"),
        (errors.Unavailable("x"), "overloaded_error"),
        (errors.EngineDied("x"), "api_error"),
        (errors.Cancelled("x"), "api_error"),
    ],
)
def test_anthropic_s_errors(error: errors.LocalrunError, type_: str) -> None:
    expected = {"type": "error", "error": {"type": type_, "message": error.message}, "request_id": None}
    assert json.loads(failures.body(error, Shape.ANTHROPIC)) == expected
    name, data = failures.stream_event(error, Shape.ANTHROPIC).decode().split("\n", 1)
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == expected


@pytest.mark.parametrize(
    ("number", "path", "status", "said"),
    [
        (errno.EROFS, "/data/models", 500, ["/data/models", os.strerror(errno.EROFS)]),
        (errno.EACCES, "/data/models", 500, ["/data/models", os.strerror(errno.EACCES)]),
        (errno.ENOSPC, "/data/models", 507, ["/data/models", "full"]),
        (errno.ENOSPC, None, 507, ["full"]),
        (errno.EBADF, "/data/models", 500, ["the daemon's log"]),
    ],
)
def test_what_is_wrong_with_the_disk_is_told(number: int, path: str | None, status: int, said: list[str]) -> None:
    error = failures.unforeseen(OSError(number, os.strerror(number), path), "POST /api/create")
    assert error.status == status
    assert says(error.message, *said)


def test_of_other_errors_no_details_are_told() -> None:
    assert "secret" not in failures.unforeseen(KeyError("secret"), "POST /api/create").message
