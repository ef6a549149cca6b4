"""What a reply becomes on each API, with a fake engine that says what the question scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.daemon import Daemon, calling_daemon

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{# <think> </think> <tool_call> <function= #}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}

# Thinking, content, names of the called tools.
Said = tuple[str, str, list[str]]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with calling_daemon(tmp_path_factory.mktemp("models"), TEMPLATE, kv_cells=8192) as running:
        yield running


def answer(daemon: Daemon, path: str, reply: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"SAY[[{reply}]]"}]
    got = daemon.post(path, {"model": "caller", "messages": messages, "stream": False} | fields)
    assert got.status_code == 200, got.text
    parsed: dict[str, Any] = got.json()
    return parsed


def by_chat(daemon: Daemon, reply: str) -> Said:
    tools = [{"type": "function", "function": FUNCTION}]
    message = answer(daemon, "/v1/chat/completions", reply, tools=tools)["choices"][0]["message"]
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return message.get("reasoning_content", ""), message["content"] or "", calls


def by_ollama(daemon: Daemon, reply: str) -> Said:
    tools = [{"type": "function", "function": FUNCTION}]
    message = answer(daemon, "/api/chat", reply, tools=tools)["message"]
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return message.get("thinking", ""), message["content"], calls


def by_messages(daemon: Daemon, reply: str) -> Said:
    thinks = {"type": "enabled", "budget_tokens": 1024}
    tools = [{"name": "get_weather", "input_schema": SCHEMA}]
    blocks = answer(daemon, "/v1/messages", reply, max_tokens=4096, thinking=thinks, tools=tools)["content"]
    texts = {kind: "".join(block.get(kind, "") for block in blocks) for kind in ("thinking", "text")}
    return texts["thinking"], texts["text"], [block["name"] for block in blocks if block["type"] == "tool_use"]


def by_responses(daemon: Daemon, reply: str) -> Said:
    got = daemon.post(
        "/v1/responses",
        {"model": "caller", "input": f"SAY[[{reply}]]", "tools": [{"type": "function", **FUNCTION}]},
    )
    assert got.status_code == 200, got.text
    items = got.json()["output"]
    texts = {
        kind: "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])
        for kind in ("reasoning", "message")
    }
    return texts["reasoning"], texts["message"], [item["name"] for item in items if item["type"] == "function_call"]


CHOICE = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}}}
CHOICE["required"] = ["city", "days"]
CHAT_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CHOICE}}
FORCED: dict[str, dict[str, Any]] = {
    "/api/chat": {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    "/v1/chat/completions": {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "/v1/messages": {
        "max_tokens": 200,
        "tools": [{"name": "get_weather", "input_schema": CHOICE}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
    "/v1/responses": {
        "tools": [{"type": "function", "name": "get_weather", "parameters": CHOICE}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
}


@pytest.mark.parametrize("path", FORCED)
def test_a_call_in_tags_is_forced(daemon: Daemon, path: str) -> None:
    """The engine would say something else."""
    hello = "hello" if path == "/v1/responses" else [{"role": "user", "content": "hello"}]
    field = "input" if path == "/v1/responses" else "messages"
    got = daemon.post(path, {"model": "caller", field: hello, "stream": False} | FORCED[path])
    assert got.status_code == 200, got.text
    answer = got.json()
    if path == "/v1/messages":
        (called,) = [block["input"] for block in answer["content"]]
    elif path == "/v1/responses":
        (called,) = [json.loads(item["arguments"]) for item in answer["output"]]
    else:
        message = answer["message"] if path == "/api/chat" else answer["choices"][0]["message"]
        (called,) = [call["function"]["arguments"] for call in message["tool_calls"]]
        called = json.loads(called) if isinstance(called, str) else called
    assert called["city"] in ("Paris", "Rome")
    assert isinstance(called["days"], int)


@pytest.mark.parametrize("ask", [by_chat, by_ollama, by_messages, by_responses], ids=lambda ask: ask.__name__)
@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (
            "Use re.sub(r'<think>.*?</think>', '', text) to strip it.",
            ("", "Use re.sub(r'<think>.*?</think>', '', text) to strip it.", []),
        ),
        ("<think>Hm.</think>\nThe `</think>` tag closes it.", ("Hm.", "The `</think>` tag closes it.", [])),
        (f"<think>I need it.\n{CALL}", ("I need it.", "", ["get_weather"])),
    ],
    ids=["an answer about the tags", "the same after thinking", "a call in the middle of the thinking"],
)
def test_what_is_said(daemon: Daemon, ask: Callable[[Daemon, str], Said], reply: str, expected: Said) -> None:
    assert ask(daemon, reply) == expected


def last_of(text: str) -> Any:
    """The last thing that a stream says, or all of an answer that is no stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return json.loads([line for line in lines if line.startswith("{") and "message_stop" not in line][-1])


@pytest.mark.parametrize(("stop", "is_whole"), [('"da', False), ("</tool_call>", True)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FORCED)
def test_a_call_that_a_stop_string_cut_off_is_none_that_the_answer_ended_for(
    daemon: Daemon, path: str, stream: bool, stop: str, is_whole: bool
) -> None:
    field = "input" if path == "/v1/responses" else "messages"
    hello = "hello" if path == "/v1/responses" else [{"role": "user", "content": "hello"}]
    stops = {"/api/chat": {"options": {"stop": [stop]}}, "/v1/messages": {"stop_sequences": [stop]}}
    asked = {"model": "tiny", field: hello, "stream": stream} | FORCED[path] | stops.get(path, {"stop": [stop]})
    got = daemon.post(path, asked)
    assert got.status_code == 200, got.text
    said = last_of(got.text)
    if path == "/v1/chat/completions":
        assert said["choices"][0]["finish_reason"] == ("tool_calls" if is_whole else "stop")
    elif path == "/v1/messages":
        assert said.get("delta", said)["stop_reason"] == "stop_sequence"
    elif path == "/v1/responses":
        (call,) = said.get("response", said)["output"]
        assert (call["type"], call["status"]) == ("function_call", "completed" if is_whole else "incomplete")
    else:
        assert said["done_reason"] == "stop"
        assert ("tool_calls" in got.text) == is_whole


@pytest.mark.parametrize("before", ["", "I look.\n", "I think a "])
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_in_a_call_may_be_about_calls(daemon: Daemon, stream: bool, before: str) -> None:
    """Whether the model is held to what it calls, or spoke of a call and then made one."""
    text = 'write("</parameter>")\n</parameter>\nand </tool_call>, </function>.'
    tools = [{"type": "function", "function": FUNCTION}]
    messages = [{"role": "user", "content": f"SAY[[{before}{CALL.replace('Paris', text)}]]"}]
    got = daemon.post("/v1/chat/completions", model="caller", messages=messages, tools=tools, stream=stream)
    lines = [line.removeprefix("data: ") for line in got.text.splitlines()]
    choices = [choice for line in lines if line.startswith("{") for choice in json.loads(line)["choices"]]
    calls = [call for each in choices for call in each.get("delta", each.get("message", {})).get("tool_calls", ())]
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": text}
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_a_schema_begins_on_a_line_of_its_own_behind_the_thinking(daemon: Daemon, stream: bool) -> None:
    opens = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    made = daemon.post("/api/create", model="thinker", **{"from": "tiny"}, template=opens, stream=False)
    assert made.json() == {"status": "success"}, made.text
    messages = [{"role": "user", "content": 'SAY[[<think>\nHm.</think>\n\n{"city": "Paris"}]]'}]
    asked = {"model": "thinker", "messages": messages, "format": SCHEMA, "stream": stream}
    lines = [json.loads(line) for line in daemon.post("/api/chat", asked).text.splitlines()]
    said = [line["message"] for line in lines]
    assert "".join(each.get("thinking", "") for each in said) == "Hm."
    assert "".join(each["content"] for each in said) == '{"city": "Paris"}'
    assert lines[-1]["eval_count"] == len('Hm.</think>\n\n{"city": "Paris"}')
