"""Editors whose clients cannot be run here: the requests that they send, and what they read of the answers.

The structs say what each editor needs: a missing field, or one of another type, is an editor that shows no models or
no answer. A daemon with fake engines that write what a prompt tells them (`SAY[[text]]`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import httpx2
import msgspec
import psutil
import pytest

from tests.clients.real_daemons import TOOL_TEMPLATE
from tests.daemon import Daemon, calling_daemon
from tests.fakes import ENGINE

HEADERS = {"content-type": "application/json"}
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "read_file", "description": "Read a file.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALL = 'SAY[[<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>]]'
T = TypeVar("T")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with calling_daemon(tmp_path_factory.mktemp("models"), TOOL_TEMPLATE, kv_cells=8192) as running:
        yield running


def read(answer: httpx2.Response, shape: type[T]) -> T:
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=shape, strict=True)


def lines(answer: httpx2.Response, shape: type[T]) -> list[T]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [msgspec.json.decode(line, type=shape, strict=True) for line in answer.text.splitlines()]


def events(answer: httpx2.Response) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each server-sent event; "" for one without a name."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.strip().split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.splitlines())
        if fields["data"] != "[DONE]":
            found.append((fields.get("event", ""), json.loads(fields["data"])))
    return found


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def is_engine(process: psutil.Process) -> bool:
    return ENGINE[-1] in process.cmdline()


# --- what is listed and shown -----------------------------------------------------------------------------------------


class Details(msgspec.Struct, frozen=True):
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Row(msgspec.Struct, frozen=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(msgspec.Struct, frozen=True):
    models: list[Row]


class Shown(msgspec.Struct, frozen=True):
    model_info: dict[str, Any]
    capabilities: list[str]
    details: Details
    template: str
    modified_at: str
    parameters: str = ""


class Version(msgspec.Struct, frozen=True):
    version: str


def test_probes(daemon: Daemon) -> None:
    """What editors ask first: is somebody there, is it new enough, what is there."""
    for method in ("GET", "HEAD"):
        for path in ("/", "/api/version", "/api/tags"):
            assert daemon.http.request(method, path).status_code == 200, (method, path)
    assert daemon.http.get("/").text == "Ollama is running"
    version = read(daemon.http.get("/api/version"), Version).version.split(".")
    # Copilot compares the numbers of its segments with 0.6.4, others with 0.17.6.
    assert tuple(map(int, version)) >= (0, 17, 6)


def test_every_listed_model_is_shown(daemon: Daemon) -> None:
    """Zed and Roo parse strictly, and one failure empties their list; codecompanion asks for all at once."""
    rows = read(daemon.http.get("/api/tags"), Tags).models
    assert {row.name.removesuffix(":latest") for row in rows} == {"tiny", "caller"}
    for row in rows:
        for field in ("model", "name"):
            shown = read(daemon.post("/api/show", {field: row.name}), Shown)
            architecture = shown.model_info["general.architecture"]
            assert isinstance(shown.model_info["general.basename"], str)
            assert isinstance(shown.model_info[f"{architecture}.context_length"], int)
            assert "completion" in shown.capabilities
    assert "tools" in read(daemon.post("/api/show", model="caller"), Shown).capabilities


def test_showing_loads_nothing(daemon: Daemon) -> None:
    daemon.post("/api/generate", model="caller", keep_alive=0)
    daemon.post("/api/generate", model="tiny", keep_alive=0)
    read(daemon.post("/api/show", model="caller"), Shown)
    assert daemon.http.get("/api/ps").json()["models"] == []


def test_an_unknown_model_is_an_error_in_json(daemon: Daemon) -> None:
    answer = daemon.post("/api/show", model="nowhere")
    assert answer.status_code == 404
    assert "nowhere" in answer.json()["error"]


def test_foreign_pages_are_refused(daemon: Daemon) -> None:
    assert daemon.http.get("/api/tags", headers={"host": "attacker.example"}).status_code == 403
    allowed = daemon.http.options(
        "/v1/chat/completions",
        headers={
            "origin": "http://localhost:3000",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-lang,x-stainless-retry-count",
        },
    )
    assert allowed.status_code in (200, 204)
    assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"].lower()


# --- Ollama's chat ----------------------------------------------------------------------------------------------------


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]


class Call(msgspec.Struct, frozen=True):
    function: CalledFunction


class Message(msgspec.Struct, frozen=True):
    role: Literal["assistant"]
    content: str
    tool_calls: list[Call] = []
    thinking: str = ""


class Part(msgspec.Struct, frozen=True):
    model: str
    created_at: str
    message: Message
    done: bool
    done_reason: str = ""


class LastPart(Part, frozen=True, kw_only=True):
    total_duration: int
    prompt_eval_count: int
    eval_count: int


def chat(daemon: Daemon, **fields: Any) -> tuple[list[Part], str]:
    answer = daemon.post("/api/chat", {"model": "caller"} | fields)
    parts = lines(answer, Part)
    msgspec.json.decode(answer.text.splitlines()[-1], type=LastPart)
    assert [part.done for part in parts].index(True) == len(parts) - 1
    return parts, "".join(part.message.content for part in parts)


def calls(parts: list[Part]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, call.function.arguments) for part in parts for call in part.message.tool_calls]


def test_zed(daemon: Daemon) -> None:
    body = {
        "model": "caller", "messages": user("SAY[[fine]]"), "stream": True, "keep_alive": -1, "think": None,
        "options": {"num_ctx": 4096, "stop": [], "temperature": 1.0}, "tools": [],
    }  # fmt: skip
    assert chat(daemon, **body)[1] == "fine"
    whole = read(daemon.post("/api/chat", body | {"stream": False, "tools": [TOOL], "messages": user(CALL)}), LastPart)
    assert calls([whole]) == [("read_file", {"path": "a.py"})]


def test_zed_s_edit_prediction(daemon: Daemon) -> None:
    stops = [f"<|stop_{number}|>" for number in range(14)]
    body = {
        "model": "tiny", "prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", "raw": True, "stream": False,
        "options": {"num_predict": 8, "temperature": 0.2, "stop": stops}, "keep_alive": -1,
    }  # fmt: skip
    answer = daemon.post("/api/generate", body).json()
    assert answer["done"]
    assert isinstance(answer["response"], str)


def test_continue(daemon: Daemon) -> None:
    options = {"num_ctx": 8192, "num_predict": 2048, "stop": ["<|endoftext|>"], "temperature": 0.5}
    shared = {"keep_alive": 1800, "options": options}
    assert chat(daemon, messages=user("SAY[[fine]]"), **shared)[1] == "fine"
    parts, _ = chat(daemon, messages=user(CALL), tools=[TOOL], think=False, **shared)
    assert calls(parts) == [("read_file", {"path": "a.py"})]
    filled = daemon.post("/api/generate", {"model": "tiny", "prompt": "a", "suffix": "b", "raw": False} | shared)
    assert filled.status_code == 400, "a model without tokens to fill in with says so"
    assert isinstance(filled.json()["error"], str)


def test_cline(daemon: Daemon) -> None:
    parts, _ = chat(
        daemon, messages=[{"role": "system", "content": "You edit."}, *user(CALL)], tools=[TOOL], stream=True,
        options={"num_ctx": 8192},
    )  # fmt: skip
    assert calls(parts) == [("read_file", {"path": "a.py"})]
    called = {"function": {"name": "read_file", "arguments": {"path": "a.py"}}}
    messages = [
        *user(CALL),
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_name": "read_file", "content": "SAY[[it is short]]"},
    ]
    assert chat(daemon, messages=messages, tools=[TOOL], options={"num_ctx": 8192})[1] == "it is short"


def test_avante_and_codecompanion(daemon: Daemon) -> None:
    messages = [
        {"role": "developer", "content": "You edit."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_content": "because"},
        *user("SAY[[fine]]"),
    ]
    assert chat(daemon, messages=messages, stream=True)[1] == "fine"
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    _, text = chat(daemon, messages=user('SAY[[{"ok": true}]]'), format=schema)
    assert json.loads(text) == {"ok": True}


def test_a_client_does_not_notice_that_the_engine_dies(daemon: Daemon) -> None:
    said = "word " * 700
    body = {"model": "caller", "messages": user(f"SAY[[{said}]]"), "options": {"num_predict": -1}}
    with daemon.http.stream("POST", "/api/chat", json=body) as answer:
        found = answer.iter_lines()
        lines = [json.loads(next(found))]
        (engine,) = [child for child in psutil.Process(daemon.process.pid).children(recursive=True) if is_engine(child)]
        engine.kill()
        lines += [json.loads(line) for line in found]
    text = "".join(line["message"]["content"] for line in lines)
    assert said.startswith(text)
    assert len(text) > 10
    assert lines[-1]["done"] is True


# --- OpenAI's routes --------------------------------------------------------------------------------------------------


def completion(daemon: Daemon, **fields: Any) -> list[dict[str, Any]]:
    answer = daemon.post("/v1/chat/completions", {"model": "caller", "stream": True} | fields)
    assert answer.text.endswith("data: [DONE]\n\n")
    return [data for _, data in events(answer)]


def test_copilot(daemon: Daemon) -> None:
    chunks = completion(
        daemon, messages=[{"role": "system", "content": "You edit."}, *user([{"type": "text", "text": CALL}])],
        temperature=0.1, top_p=1, max_tokens=400, n=1, stream_options={"include_usage": True}, tool_choice="auto",
        tools=[TOOL],
    )  # fmt: skip
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert pieces[0]["id"]
    assert pieces[0]["function"]["name"] == "read_file"
    assert json.loads("".join(piece["function"].get("arguments", "") for piece in pieces)) == {"path": "a.py"}
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "tool_calls"
    assert chunks[-1]["usage"]["total_tokens"] > 0


def test_jetbrains_and_others_by_openai_s_routes(daemon: Daemon) -> None:
    listed = daemon.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert all({"id", "object", "created", "owned_by"} <= set(model) for model in listed["data"])
    chunks = completion(daemon, messages=user("SAY[[fine]]"))
    assert "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]) == "fine"


def test_codex(daemon: Daemon) -> None:
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": CALL}]}
    body = {
        "model": "caller", "instructions": "You edit.", "input": [message], "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": None, "store": False, "stream": True,
        "include": [], "prompt_cache_key": "one-conversation",
    }  # fmt: skip
    found = events(daemon.post("/v1/responses", body))
    assert all(name == data["type"] for name, data in found)
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    names = [name for name, _ in found]
    assert (names[0], names[-1]) == ("response.created", "response.completed")
    done = [data["item"] for name, data in found if name == "response.output_item.done"]
    (call,) = [item for item in done if item["type"] == "function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("read_file", {"path": "a.py"})
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "SAY[[it is short]]"}
    after = events(daemon.post("/v1/responses", body | {"input": [message, call, output]}))
    deltas = [data["delta"] for name, data in after if name == "response.output_text.delta"]
    assert "".join(deltas) == "it is short"
    usage = after[-1][1]["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > 0, "what was sent before is not computed again"


def test_codex_s_other_kinds_of_tools(daemon: Daemon) -> None:
    """Those of its MCP servers are in namespaces, and `apply_patch` takes a text (openai/codex#36942)."""
    patch = '*** Begin Patch\n+ "x"\n*** End Patch'
    place = {"type": "object", "properties": {"where": {"type": "string"}}}
    now = {"type": "function", "name": "now", "parameters": place}
    tools = [
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
        },
        {"type": "namespace", "name": "mcp__wx", "tools": [now]},
        {"type": "web_search"},
    ]

    def calls(name: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
        call = json.dumps({"name": name, "arguments": arguments})
        body = {"model": "caller", "input": f"SAY[[<tool_call>\n{call}\n</tool_call>]]", "tools": tools, "stream": True}
        found = events(daemon.post("/v1/responses", body))
        [item] = found[-1][1]["response"]["output"]
        return item, found

    item, found = calls("mcp__wx__now", {"where": "here"})
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__wx", "now")
    assert json.loads(item["arguments"]) == {"where": "here"}
    item, found = calls("apply_patch", {"input": patch})
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", patch)
    told = [data for name, data in found if name.startswith("response.custom_tool_call_input")]
    assert [data["type"].rpartition(".")[2] for data in told] == ["delta", "done"]
    assert (told[0]["delta"], told[1]["input"], told[1]["item_id"]) == (patch, patch, item["id"])
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "SAY[[it is done]]"}
    after = daemon.post("/v1/responses", model="caller", tools=tools, input=[item, result]).json()
    assert after["output"][0]["content"][0]["text"] == "it is done"


# --- Anthropic's routes -----------------------------------------------------------------------------------------------


def test_claude_code(daemon: Daemon) -> None:
    marked = {"cache_control": {"type": "ephemeral"}}
    tool = {"name": "read_file", "description": "Read a file.", "input_schema": PARAMETERS}
    messages: list[dict[str, Any]] = user([{"type": "text", "text": CALL} | marked])
    body = {
        "model": "caller", "max_tokens": 400, "stream": True, "temperature": 1, "messages": messages, "tools": [tool],
        "system": [{"type": "text", "text": "You edit."} | marked], "metadata": {"user_id": "somebody"},
    }  # fmt: skip
    headers = HEADERS | {"anthropic-version": "2023-06-01", "anthropic-beta": "unknown-2026-01-01", "x-api-key": "any"}
    found = events(daemon.http.post("/v1/messages?beta=true", json=body, headers=headers))
    assert all(name == data["type"] for name, data in found)
    names = [name for name, _ in found if name != "ping"]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    (start,) = [data for name, data in found if name == "content_block_start" and "input" in data["content_block"]]
    pieces = [
        data["delta"]["partial_json"] for _, data in found if data.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert json.loads("".join(pieces)) == {"path": "a.py"}
    block = start["content_block"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "read_file", {})
    messages += [
        {"role": "assistant", "content": [block | {"input": {"path": "a.py"}}]},
        *user([{"type": "tool_result", "tool_use_id": block["id"], "content": "12 lines"} | marked]),
        {"role": "system", "content": "SAY[[it is short]]"},
    ]
    after = daemon.http.post("/v1/messages?beta=true", json=body | {"stream": False}, headers=headers).json()
    assert [(block["type"], block["text"]) for block in after["content"]] == [("text", "it is short")]
    assert after["usage"]["cache_read_input_tokens"] > 0, "a system message in the middle keeps the prefix"
    counted = daemon.http.post(
        "/v1/messages/count_tokens?beta=true", headers=headers,
        json={name: body[name] for name in ("model", "messages", "tools", "system")},
    )  # fmt: skip
    usage = after["usage"]
    assert counted.json() == {
        "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    }
