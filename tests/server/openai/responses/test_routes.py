"""/v1/responses on a daemon with fake engines: answers, streams, what is kept, and errors."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest

from tests.daemon import N_CTX, Daemon, running_daemon
from tests.server.openai.responses.shapes import Event, Response

N_HELLO = len("<user\nhello>\n<assistant\n")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


def post(daemon: Daemon, **fields: Any) -> httpx2.Response:
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 6, "temperature": 0} | fields
    return daemon.post("/v1/responses", body)


def respond(daemon: Daemon, **fields: Any) -> dict[str, Any]:
    """A whole response, checked against the strict shape."""
    answer = post(daemon, **fields)
    assert answer.status_code == 200, answer.text
    msgspec.json.decode(answer.content, type=Response)
    parsed: dict[str, Any] = answer.json()
    return parsed


def events(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "text/event-stream"
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    told = []
    for block in blocks:
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        msgspec.convert(event, Event)
        told.append(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def test_a_whole_response(daemon: Daemon) -> None:
    answer = post(daemon, ignore_eos=True, metadata={"k": "v"})
    assert answer.headers["x-localrun-request"].startswith("req_")
    response = respond(daemon, ignore_eos=True, metadata={"k": "v"})
    assert response["id"].startswith("resp_")
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["metadata"] == {"k": "v"}
    assert response["usage"]["input_tokens"] == N_HELLO
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": N_HELLO - 1, "cache_write_tokens": 0}
    assert response["usage"]["output_tokens"] == 6
    assert response["output"][0]["status"] == "incomplete"
    assert text_of(response) == text_of(answer.json())


def test_a_streamed_response_is_the_whole_one(daemon: Daemon) -> None:
    whole = respond(daemon, max_output_tokens=40.0)
    assert whole["max_output_tokens"] == 40
    told = events(post(daemon, max_output_tokens=40, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in told]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:-1] == ["output_text.done", "content_part.done", "output_item.done"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-1] == whole["status"]
    assert told[0]["response"]["status"] == "in_progress"
    assert "".join(event["delta"] for event in told if event["type"].endswith("delta")) == text_of(whole)
    last = told[-1]["response"]
    assert text_of(last) == text_of(whole)
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_input_as_items_is_input_as_text(daemon: Daemon) -> None:
    as_items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    assert text_of(respond(daemon, input=as_items)) == text_of(respond(daemon))


def test_instructions_are_a_system_message_of_this_response_alone(daemon: Daemon) -> None:
    told = respond(daemon, instructions="be brief")
    assert told["instructions"] == "be brief"
    assert told["usage"]["input_tokens"] > N_HELLO
    after = respond(daemon, previous_response_id=told["id"], input="more")
    plain = respond(daemon, input=[{"role": "user", "content": "hello"}, *told["output"],
                                   {"role": "user", "content": "more"}])  # fmt: skip
    assert after["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    assert text_of(after) == text_of(plain)


def test_a_conversation_goes_on_from_any_of_its_responses(daemon: Daemon) -> None:
    first = respond(daemon)
    second = respond(daemon, previous_response_id=first["id"], input="more")
    assert second["previous_response_id"] == first["id"]
    other = respond(daemon, previous_response_id=first["id"], input="less")
    assert text_of(second) != text_of(other)
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > N_HELLO - 1, "the first turn was not recomputed"
    listed = daemon.http.get(f"/v1/responses/{second['id']}/input_items").json()
    assert [item["type"] for item in listed["data"]] == ["message"] * 3
    assert (listed["first_id"], listed["last_id"]) == (listed["data"][0]["id"], listed["data"][-1]["id"])
    assert listed["data"][0]["content"][0]["text"] == "more"


def test_what_an_item_has_besides_its_fields_is_not_kept(daemon: Daemon) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "hello"},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]
    response = respond(daemon, input=[item | {"junk": [[[]]] * 100} for item in items])
    assert text_of(response) == text_of(respond(daemon, input=items))
    listed = daemon.http.get(f"/v1/responses/{response['id']}/input_items").json()["data"]
    assert [set(item) & {"junk", "call_id", "content"} for item in listed] == [{"call_id"}, {"call_id"}, {"content"}]


def test_an_item_can_be_named_instead_of_sent(daemon: Daemon) -> None:
    first = respond(daemon)
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    named = respond(daemon, input=[{"role": "user", "content": "hello"}, reference, {"role": "user", "content": "x"}])
    assert text_of(named) == text_of(respond(daemon, previous_response_id=first["id"], input="x"))


def test_a_kept_response_is_read_and_deleted(daemon: Daemon) -> None:
    response = respond(daemon)
    path = f"/v1/responses/{response['id']}"
    assert daemon.http.get(path).json() == response
    assert daemon.http.delete(path).json() == {"id": response["id"], "object": "response", "deleted": True}
    for gone in (daemon.http.get(path), daemon.http.delete(path), daemon.http.get(path + "/input_items"),
                 post(daemon, previous_response_id=response["id"])):  # fmt: skip
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")


def test_a_response_that_is_not_to_be_kept_is_not(daemon: Daemon) -> None:
    response = respond(daemon, store=False)
    assert response["store"] is False
    assert daemon.http.get(f"/v1/responses/{response['id']}").status_code == 404
    streamed = events(post(daemon, stream=True))[-1]["response"]
    assert daemon.http.get(f"/v1/responses/{streamed['id']}").json() == streamed


def test_logprobs_of_the_text(daemon: Daemon) -> None:
    response = respond(daemon, include=["message.output_text.logprobs"], top_logprobs=2, ignore_eos=True)
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 6
    assert len(logprobs[0]["top_logprobs"]) == 2
    told = events(post(daemon, top_logprobs=2, ignore_eos=True, stream=True))
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    assert sum(len(event["logprobs"]) for event in deltas) == 6
    assert respond(daemon)["output"][0]["content"][0]["logprobs"] == []


SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
          "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    "shape", [{"type": "json_object"}, {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}]
)
def test_text_of_a_shape(daemon: Daemon, shape: dict[str, Any]) -> None:
    described = {name: value for name, value in shape.items() if name != "type"}
    of_chats = {"type": shape["type"]} | ({"json_schema": described} if described else {})
    for fields in ({"text": {"format": shape}}, {"response_format": of_chats}, {"response_format": shape}):
        response = respond(daemon, **fields, max_output_tokens=200)
        assert response["text"]["format"].items() <= shape.items()
        parsed = json.loads(text_of(response))
        assert isinstance(parsed, dict)
        if shape["type"] == "json_schema":
            assert isinstance(parsed["yes"], bool)


def test_effort_by_its_name_in_chats(daemon: Daemon) -> None:
    assert respond(daemon, reasoning_effort="low")["reasoning"]["effort"] == "low"
    assert respond(daemon, reasoning_effort="low", reasoning={"effort": "high"})["reasoning"]["effort"] == "high"
    assert respond(daemon, reasoning_effort="low", reasoning={})["reasoning"]["effort"] == "low"


def test_tools_that_openai_runs_are_left_out(daemon: Daemon) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    search, sent = {"type": "web_search"}, [{"role": "user", "content": "hello"}, {"type": "compaction"}]
    response = respond(daemon, tools=[tool, search], tool_choice="none", input=sent)
    assert response["tools"] == [tool | {"strict": False}]
    assert response["tool_choice"] == "none"
    answer = post(daemon, tools=[tool, search], tool_choice={"type": "web_search"}, input=sent)
    assert answer.headers["x-localrun-ignored"] == "tools[1] (web_search); input[1] (compaction)"
    assert f"request {answer.headers['x-localrun-request']}: ignored tools[1] (web_search)" in daemon.log
    assert "x-localrun-ignored" not in post(daemon, tools=[tool], tool_choice="none").headers


def test_an_empty_list_is_an_empty_message(daemon: Daemon) -> None:
    """Agents probe a server with one."""
    empty, text = (respond(daemon, input=sent, max_output_tokens=1) for sent in ([], ""))
    assert empty["usage"]["input_tokens"] == text["usage"]["input_tokens"]
    before = respond(daemon, max_output_tokens=1)
    assert respond(daemon, input=[], previous_response_id=before["id"], max_output_tokens=1)["output"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 1}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "some"}, "truncation"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"reasoning": {"effort": "a lot"}}, "reasoning.effort"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ],
)
def test_bad_fields_are_named(daemon: Daemon, fields: dict[str, Any], param: str) -> None:
    answer = post(daemon, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_conversation_longer_than_the_context_is_refused(daemon: Daemon) -> None:
    answer = post(daemon, input="x" * 5000)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert str(N_CTX) in error["message"]


def test_a_stream_says_in_its_events_that_the_conversation_is_too_long(daemon: Daemon) -> None:
    """As OpenAI's do: of a status Codex does not learn that it must shorten the conversation."""
    answer = post(daemon, input="x" * 5000, stream=True, temperature=0.25)
    assert (answer.status_code, answer.headers["x-localrun-error"]) == (200, "context_length_exceeded")
    begun, _, error, failed = events(answer)
    assert [begun["type"], error["type"], failed["type"]] == ["response.created", "error", "response.failed"]
    assert begun["response"]["temperature"] == 0.25
    assert (error["error"]["code"], error["error"]["param"]) == ("context_length_exceeded", "input")
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
    assert str(N_CTX) in failed["response"]["error"]["message"]
    assert respond(daemon)["status"]


def test_a_stream_that_breaks_off_says_so_in_its_last_event() -> None:
    with running_daemon(LOCALRUN_RESUME="off", LOCALRUN_FAKE_STEP_MS="10") as daemon:
        body = {"model": "tiny", "input": "x", "stream": True, "ignore_eos": True}
        with daemon.http.stream("POST", "/v1/responses", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(daemon.http.get("/localrun/v1/snapshot").json()["engines"][0]["pid"], signal.SIGKILL)
            data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        last = json.loads(data[-1])
        msgspec.convert(last, Event)
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "server_error"
        assert last["response"]["error"]["type"] == "engine_died"
        assert respond(daemon)["status"]


def test_a_client_that_leaves_frees_its_slot() -> None:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="10", LOCALRUN_SLOTS="1") as daemon:
        body = {"model": "tiny", "input": "x", "stream": True, "ignore_eos": True}
        with daemon.http.stream("POST", "/v1/responses", json=body) as answer:
            next(answer.iter_lines())
        assert respond(daemon)["usage"]["output_tokens"] <= 6
