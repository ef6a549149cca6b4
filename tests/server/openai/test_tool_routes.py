"""Tools, thinking and prefixes over HTTP, with fake engines: whatever such an engine writes, what is constrained is
well formed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest

from tests.daemon import Daemon, running_daemon
from tests.says import says
from tests.server.openai import shapes
from tests.server.openai.responses.shapes import Event, Response

HELLO = [{"role": "user", "content": "is it warm in Paris?"}]
# Every value is short, so that an answer that is made of random tokens ends.
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Weather.", "parameters": PARAMETERS}}


TOOLS = [tool("look"), tool("guess")]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


def ask(daemon: Daemon, **fields: Any) -> httpx2.Response:
    body = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "max_tokens": 500, "temperature": 0} | fields
    answer = daemon.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer


def choice_of(daemon: Daemon, **fields: Any) -> dict[str, Any]:
    answer = ask(daemon, **fields)
    msgspec.json.decode(answer.content, type=shapes.Chat)
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def deltas_of(daemon: Daemon, **fields: Any) -> tuple[list[dict[str, Any]], str]:
    """All deltas of a stream, and why it ended."""
    *data, done, _ = ask(daemon, stream=True, **fields).text.split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(item.removeprefix("data: ")) for item in data]
    msgspec.convert(chunks, list[shapes.ChatChunk])
    return [chunk["choices"][0]["delta"] for chunk in chunks], chunks[-1]["choices"][0]["finish_reason"]


def check_arguments(text: str) -> None:
    arguments = json.loads(text)
    assert set(arguments) == {"city", "warm"}
    assert arguments["city"] in ("Paris", "London")
    assert isinstance(arguments["warm"], bool)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"look", "guess"}),
        ("any", {"look", "guess"}),
        ({"type": "function", "function": {"name": "guess"}}, {"guess"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]},
            },
            {"look"},
        ),
    ],
)
def test_a_call_that_must_be_made(daemon: Daemon, choice: Any, names: set[str]) -> None:
    made = choice_of(daemon, tool_choice=choice, parallel_tool_calls=False)
    assert made["finish_reason"] == "tool_calls"
    (call,) = made["message"]["tool_calls"]
    assert call["function"]["name"] in names
    check_arguments(call["function"]["arguments"])


def test_a_streamed_call_is_the_whole_one(daemon: Daemon) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    whole = choice_of(daemon, **fields)["message"]["tool_calls"][0]
    deltas, reason = deltas_of(daemon, **fields)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert reason == "tool_calls"
    assert (calls[0]["index"], calls[0]["type"], calls[0]["function"]["name"]) == (
        0, "function", whole["function"]["name"],
    )  # fmt: skip
    assert calls[0]["id"]
    assert all("id" not in call for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == whole["function"]["arguments"]
    assert len(calls) > 3, "the arguments of a constrained call are sent as they come"


def test_several_answers_each_have_calls_of_their_own(daemon: Daemon) -> None:
    content = ask(daemon, tool_choice="required", parallel_tool_calls=False, n=2, seed=4, temperature=1).json()
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in content["choices"]]
    assert len(set(ids)) == 2


def test_no_call_where_none_is_wanted(daemon: Daemon) -> None:
    made = choice_of(daemon, tool_choice="none", max_tokens=30)
    assert "tool_calls" not in made["message"]
    plain = choice_of(daemon, tools=[], max_tokens=30)
    assert made["message"] == plain["message"], "the prompt is that of a chat without tools"


def test_tools_are_part_of_the_prompt(daemon: Daemon) -> None:
    with_tools = ask(daemon, max_tokens=1).json()["usage"]["prompt_tokens"]
    without = ask(daemon, max_tokens=1, tools=[]).json()["usage"]["prompt_tokens"]
    assert with_tools > without + len("look") + len("guess")


def test_the_older_form(daemon: Daemon) -> None:
    functions = [described["function"] for described in TOOLS]
    made = choice_of(daemon, tools=[], functions=functions, function_call={"name": "look"})
    assert (made["finish_reason"], made["message"]["content"]) == ("function_call", None)
    assert made["message"]["function_call"]["name"] == "look"
    check_arguments(made["message"]["function_call"]["arguments"])
    deltas, reason = deltas_of(daemon, tools=[], functions=functions, function_call={"name": "look"})
    assert reason == "function_call"
    text = "".join(delta["function_call"]["arguments"] for delta in deltas if "function_call" in delta)
    assert text == made["message"]["function_call"]["arguments"]


def test_a_tool_s_answer_goes_back(daemon: Daemon) -> None:
    call = choice_of(daemon, tool_choice="required", parallel_tool_calls=False)["message"]
    answered = [*HELLO, call, {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "22 degrees"}]
    usage = ask(daemon, messages=answered, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens"] > ask(daemon, max_tokens=1).json()["usage"]["prompt_tokens"] + len("22 degrees")


def test_what_calls_there_may_be_is_said_before_the_engine_is_asked(daemon: Daemon) -> None:
    body = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}
    answer = daemon.post("/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


def test_an_answer_goes_on_from_its_prefix(daemon: Daemon) -> None:
    fields: dict[str, Any] = {"tools": [], "max_tokens": 12, "ignore_eos": True}
    for turn in range(100):
        asked = [{"role": "user", "content": f"question {turn}"}]
        whole = choice_of(daemon, messages=asked, **fields)["message"]["content"]
        # The fake engine writes halves of characters too, which no text can stand for.
        if whole[:5].isascii():
            break
    begun = {"role": "assistant", "content": whole[:5]}
    for how in (
        {"messages": [*asked, begun | {"prefix": True}]},
        {"messages": [*asked, begun], "continue_final_message": True, "add_generation_prompt": False},
    ):
        rest = choice_of(daemon, **fields, **how)["message"]["content"]
        assert (whole[:5] + rest).startswith(whole)
    new_turn = choice_of(daemon, messages=[*asked, begun], **fields)["message"]["content"]
    assert new_turn != rest


YES_OR_NO = {"enum": ["yes", "no"]}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"json_schema": YES_OR_NO, "continue_final_message": True}),
        ("/v1/chat/completions", {"grammar": r'root ::= "\"yes\"" | "\"no\""', "continue_final_message": True}),
        ("/api/chat", {"format": YES_OR_NO, "stream": False}),
    ],
)
def test_a_format_is_that_of_the_whole_answer(daemon: Daemon, path: str, fields: dict[str, Any]) -> None:
    def answer(begun: str) -> httpx2.Response:
        messages = [*HELLO, {"role": "assistant", "content": begun}]
        return daemon.post(path, {"model": "tiny", "messages": messages, **fields})

    def rest(begun: str) -> str:
        content = answer(begun).json()
        return str((content["choices"][0] if "choices" in content else content)["message"]["content"])

    assert [rest(begun) for begun in ('"y', '"no', '"yes"')] == ['es"', '"', ""]
    assert rest(" ") in ('"yes"', '"no"')
    refused = answer("Well: ")
    assert refused.status_code == 400
    assert says(refused.json(), "messages: ", "last one", "format")


def test_thinking_of_a_model_that_does_not(daemon: Daemon) -> None:
    """An agent has one setting for all its models: the answer comes, and says what it does not have."""
    for path, fields, field in (
        ("/v1/chat/completions", {"messages": HELLO, "reasoning_effort": "high"}, "reasoning_effort"),
        ("/v1/chat/completions", {"messages": HELLO, "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ("/v1/responses", {"input": "x", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    ):
        answer = daemon.post(path, {"model": "tiny"} | fields)
        assert answer.status_code == 200
        assert answer.headers["x-localrun-ignored"] == f"{field}: this model does not support thinking"
    assert choice_of(daemon, tools=[], reasoning_effort="none", max_tokens=3)


# --- responses -------------------------------------------------------------------------------------------------------


def flat(name: str) -> dict[str, Any]:
    return {"type": "function"} | tool(name)["function"]


def respond(daemon: Daemon, **fields: Any) -> httpx2.Response:
    body = {"model": "tiny", "input": HELLO, "tools": [flat("look")], "temperature": 0, "max_output_tokens": 500}
    return daemon.post("/v1/responses", body | fields)


def test_a_response_that_calls_and_goes_on(daemon: Daemon) -> None:
    answer = respond(daemon, tool_choice="required", parallel_tool_calls=False)
    msgspec.json.decode(answer.content, type=Response)
    response = answer.json()
    (call,) = response["output"]
    assert (call["type"], call["name"], response["status"]) == ("function_call", "look", "completed")
    check_arguments(call["arguments"])
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "22 degrees"}
    after = respond(daemon, previous_response_id=response["id"], input=[output], max_output_tokens=3)
    assert after.status_code == 200, after.text
    assert after.json()["usage"]["input_tokens"] > response["usage"]["input_tokens"]


def test_the_events_of_a_call(daemon: Daemon) -> None:
    fields = {"tool_choice": {"type": "function", "name": "look"}, "parallel_tool_calls": False}
    whole = respond(daemon, **fields).json()["output"][0]
    blocks = respond(daemon, stream=True, **fields).text.split("\n\n")[:-1]
    events = [json.loads(block.partition("data: ")[2]) for block in blocks]
    msgspec.convert(events, list[Event])
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert "".join(event["delta"] for event in events if "delta" in event) == whole["arguments"]
    assert events[-3]["arguments"] == whole["arguments"]


def test_a_stream_begins_with_its_role_and_no_content(daemon: Daemon) -> None:
    """Clients add up the content of all deltas that have some, and take an empty one for the beginning of a text."""
    for choice in ("auto", "none", "required"):
        role, *others = deltas_of(daemon, tool_choice=choice)[0]
        assert role == {"role": "assistant"}
        assert all("role" not in delta and delta.get("content") != "" for delta in others)


@pytest.mark.parametrize("n_tokens", [1, 12, 20])
def test_a_forced_call_that_max_tokens_cuts_before_its_arguments_is_left_out(daemon: Daemon, n_tokens: int) -> None:
    fields: dict[str, Any] = {"tool_choice": "required", "max_tokens": n_tokens}
    choice = choice_of(daemon, **fields)
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    deltas, reason = deltas_of(daemon, **fields)
    assert reason == "length"
    assert all(not delta.get("content") and "tool_calls" not in delta for delta in deltas)


def test_a_forced_call_that_max_tokens_cuts_in_its_arguments_is_left_out_of_a_whole_answer(daemon: Daemon) -> None:
    fields: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": "look"}}, "max_tokens": 55}
    choice = choice_of(daemon, **fields)
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    deltas, _ = deltas_of(daemon, **fields)
    assert next(delta["tool_calls"][0]["function"]["name"] for delta in deltas if "tool_calls" in delta) == "look"
    assert all(not delta.get("content") for delta in deltas)


def test_a_schema_that_does_not_compile_leaves_auto_alone_and_is_named_where_a_call_is_forced(daemon: Daemon) -> None:
    broken = tool("broken")
    broken["function"]["parameters"] = {"type": "object", "properties": {"q": {"type": "string", "pattern": "("}}}
    body = {"model": "tiny", "messages": HELLO, "tools": [*TOOLS, broken], "max_tokens": 5}
    free = daemon.post("/v1/chat/completions", body)
    assert free.status_code == 200, free.text
    refused = daemon.post("/v1/chat/completions", body | {"tool_choice": "required"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("the tool 'broken': parameters.properties.q: regex ")
