"""The setting `strict_schemas`: what cannot be enforced is refused on every API, whatever the request says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.daemon import Daemon, running_daemon
from tests.says import says

SCHEMA = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}, "required": ["tags"]}
ANY = {"type": "object"}
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(LOCALRUN_STRICT_SCHEMAS="on") as running:
        yield running


def chat_tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "look", "parameters": schema}}]}


def bodies(schema: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each way in, by the path of its schema."""
    described = {"type": "json_schema", "name": "x", "schema": schema}
    nested = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}
    return {
        "response_format.json_schema.schema": ("/v1/chat/completions", HELLO | {"response_format": nested}),
        "tools[0].function.parameters": (
            "/v1/chat/completions",
            HELLO | chat_tool(schema) | {"tool_choice": "required"},
        ),
        "text.format.schema": (
            "/v1/responses",
            {"model": "tiny", "input": "hello", "text": {"format": described}, "max_output_tokens": 16},
        ),
        "output_config.format.schema": (
            "/v1/messages",
            HELLO | {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        "format": ("/api/chat", HELLO | {"format": schema, "stream": False, "options": {"num_predict": 5}}),
        "json_schema": ("/completion", {"model": "tiny", "prompt": "hello", "n_predict": 5, "json_schema": schema}),
    }


@pytest.mark.parametrize("field", bodies(ANY))
def test_what_cannot_be_enforced_is_refused_on_each_api_and_the_rest_is_not(daemon: Daemon, field: str):
    path, body = bodies(SCHEMA)[field]
    answer = daemon.post(path, body)
    assert answer.status_code == 400, answer.text
    assert says(answer.text, f"{field}.properties.tags.uniqueItems", "the setting strict_schemas")
    path, body = bodies(ANY)[field]
    assert daemon.post(path, body).status_code == 200


def test_a_tool_that_need_not_be_called_keeps_what_can_be_enforced_of_its_schema(daemon: Daemon):
    answer = daemon.post("/v1/chat/completions", HELLO | chat_tool(SCHEMA))
    assert answer.status_code == 200, answer.text
    assert says(answer.headers["x-localrun-ignored"], "uniqueItems")
