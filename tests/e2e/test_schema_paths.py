"""A schema's fault is told by its path in the body, as each API writes it; what is left out, in the same words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.daemon import Daemon

HELLO = [{"role": "user", "content": "Hello."}]


def tools(shape: str, schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Two tools, of which the second one has the schema."""
    functions = [
        {"name": name, "parameters" if shape != "anthropic" else "input_schema": {"type": "object", "properties": each}}
        for name, each in (("first", {}), ("second", {"a": schema}))
    ]
    if shape == "chat":
        return [{"type": "function", "function": function} for function in functions]
    return [{"type": "function", **function} for function in functions] if shape == "responses" else functions


SECOND: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": HELLO, "tool_choice": {"type": "function", "function": {"name": "second"}}, "max_tokens": 9},
        "tools[1].function.parameters.properties.a",
    ),
    "responses": (
        "/v1/responses",
        {"input": "Hello.", "tool_choice": {"type": "function", "name": "second"}, "max_output_tokens": 16},
        "tools[1].parameters.properties.a",
    ),
    "anthropic": (
        "/v1/messages",
        {"messages": HELLO, "tool_choice": {"type": "tool", "name": "second"}, "max_tokens": 9},
        "tools[1].input_schema.properties.a",
    ),
}


@pytest.mark.parametrize("shape", SECOND)
def test_the_tool_that_must_be_called_is_named_where_it_stands(daemon: Daemon, shape: str) -> None:
    path, body, where = SECOND[shape]
    refused = daemon.post(path, body | {"model": "tiny", "tools": tools(shape, {"minLenght": 1})})
    assert (refused.status_code, refused.json()["error"]["message"].startswith(f"{where}: ")) == (400, True)
    weakened = daemon.post(
        path, body | {"model": "tiny", "tools": tools(shape, {"type": "array", "uniqueItems": True})}
    )
    assert (weakened.status_code, weakened.headers["x-localrun-ignored"]) == (
        200,
        f"{where}.uniqueItems: cannot be enforced",
    )
    strict = tools(shape, {"type": "array", "uniqueItems": True})
    (strict[1]["function"] if shape == "chat" else strict[1])["strict"] = True
    refused = daemon.post(path, body | {"model": "tiny", "tools": strict})
    assert (refused.status_code, f"{where}.uniqueItems: " in refused.text) == (400, True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("path", "asked", "where"),
    [
        ("/v1/chat/completions", "response_format", "response_format.json_schema.schema"),
        ("/v1/responses", "text", "text.format.schema"),
    ],
)
def test_a_schema_of_an_answer_is_weakened_and_said_unless_it_is_strict(
    daemon: Daemon, path: str, asked: str, where: str, strict: bool
) -> None:
    described = {"name": "x", "strict": strict, "schema": {"type": "array", "uniqueItems": True, "maxItems": 1}}
    shape = {"type": "json_schema", **({"json_schema": described} if asked == "response_format" else described)}
    body: dict[str, Any] = {"messages": HELLO, "response_format": shape}
    if asked == "text":
        body = {"input": "Hello.", "text": {"format": shape}}
    answer = daemon.post(path, body | {"model": "tiny"})
    assert answer.status_code == (400 if strict else 200)
    said = answer.json()["error"]["message"] if strict else answer.headers["x-localrun-ignored"]
    assert said.startswith(f"{where}.uniqueItems: cannot be enforced")
    assert strict or "cannot be enforced" in daemon.log


def test_ollama_s_format_says_it_in_the_stream_s_header(daemon: Daemon) -> None:
    body = {
        "model": "tiny",
        "messages": HELLO,
        "format": {"type": "string", "format": "regex"},
        "options": {"num_predict": 3},
    }
    with daemon.http.stream("POST", "/api/chat", json=body) as answer:
        assert answer.headers["x-localrun-ignored"].startswith("format.format: ")
    assert "x-localrun-ignored" not in daemon.post("/api/chat", body | {"format": "json", "stream": False}).headers
