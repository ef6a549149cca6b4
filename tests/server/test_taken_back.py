"""Whatever a client got, it may send back on the same API: a stream is cut after every event, and its conversation goes
on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.daemon import Daemon, calling_daemon

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant{{ '\n' }}"
)
REPLY = 'Looking.<tool_call>\n{"name": "look", "arguments": {"city": "Z\u00fcrich"}}\n</tool_call>'
ASKED = f"SAY[[{REPLY}]]"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
USER = {"role": "user", "content": ASKED}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with calling_daemon(tmp_path_factory.mktemp("models"), TEMPLATE, kv_cells=8192) as running:
        yield running


def data_of(answer: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith(("data: {", "{"))]
    return [json.loads(line) for line in lines]


def chat(daemon: Daemon) -> Iterator[tuple[str, dict[str, Any]]]:
    body = {"model": "caller", "tools": [TOOL], "max_tokens": 100}
    events = data_of(daemon.post("/v1/chat/completions", body | {"messages": [USER], "stream": True}).text)
    content, calls = "", dict[int, dict[str, Any]]()
    for event in events:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"id": "", "type": "function", "function": {"arguments": ""}})
            call["id"] = part.get("id") or call["id"]
            function = part["function"]
            call["function"]["name"] = function.get("name") or call["function"]["name"]
            call["function"]["arguments"] += function.get("arguments", "")
        said = {"role": "assistant", "content": content, "tool_calls": list(calls.values())}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "cut"} for call in calls.values()]
        yield "/v1/chat/completions", body | {"messages": [USER, said, *results, {"role": "user", "content": "go on"}]}


def ollama(daemon: Daemon) -> Iterator[tuple[str, dict[str, Any]]]:
    body: dict[str, Any] = {"model": "caller", "tools": [TOOL]}
    said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for event in data_of(daemon.post("/api/chat", body | {"messages": [USER]}).text):
        said["content"] += event["message"].get("content") or ""
        said["tool_calls"] += event["message"].get("tool_calls") or []
        results = [{"role": "tool", "content": "cut"} for _ in said["tool_calls"]]
        messages = [USER, said, *results, {"role": "user", "content": "go on"}]
        yield "/api/chat", body | {"stream": False, "messages": json.loads(json.dumps(messages))}


def responses(daemon: Daemon) -> Iterator[tuple[str, dict[str, Any]]]:
    tool = {"type": "function"} | TOOL["function"]
    body: dict[str, Any] = {"model": "caller", "tools": [tool], "max_output_tokens": 100}
    items: dict[int, dict[str, Any]] = {}
    for event in data_of(daemon.post("/v1/responses", body | {"input": [USER], "stream": True}).text):
        kind = event["type"]
        if kind in ("response.output_item.added", "response.output_item.done"):
            items[event["output_index"]] = event["item"]
        elif kind == "response.function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "response.output_text.delta":
            part = {"type": "output_text", "text": event["delta"]}
            items[event["output_index"]]["content"].append(part)
        calls = [item for item in items.values() if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "cut"} for call in calls]
        sent = [USER, *items.values(), *results, {"role": "user", "content": "go on"}]
        yield "/v1/responses", body | {"input": json.loads(json.dumps(sent))}


def messages(daemon: Daemon) -> Iterator[tuple[str, dict[str, Any]]]:
    tool = {"name": "look", "input_schema": PARAMETERS}
    body: dict[str, Any] = {"model": "caller", "tools": [tool], "max_tokens": 100}
    blocks: dict[int, dict[str, Any]] = {}
    for event in data_of(daemon.post("/v1/messages", body | {"messages": [USER], "stream": True}).text):
        if event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"]
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = (block["input"] or "") + delta["partial_json"]
            else:
                block["text"] += delta["text"]
        calls = [block for block in blocks.values() if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "cut"} for call in calls]
        rest = [{"type": "text", "text": "go on"}]
        said = [{"role": "assistant", "content": list(blocks.values())}] if blocks else []
        turns = [USER, *said, {"role": "user", "content": [*results, *rest]}]
        yield "/v1/messages", body | {"messages": json.loads(json.dumps(turns))}


@pytest.mark.parametrize("stream", [chat, ollama, responses, messages])
def test_a_stream_cut_after_any_event_is_taken_back(daemon: Daemon, stream: Any) -> None:
    n_cuts = n_calls = 0
    for path, body in stream(daemon):
        answer = daemon.post(path, body)
        assert answer.status_code == 200, (answer.text, body)
        n_cuts += 1
        n_calls += "cut" in json.dumps(body)
    assert n_cuts > 3
    assert n_calls > 0
