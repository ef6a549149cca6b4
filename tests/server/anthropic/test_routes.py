"""/v1/messages on a daemon with fake engines: the message, its events, its errors, and what the fields do."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.daemon import N_CTX, Daemon, running_daemon
from tests.server.ollama.test_reply_fields import THINKER

HELLO = [{"role": "user", "content": "is it warm in Paris?"}]
N_HELLO = len("<user\nis it warm in Paris?>\n<assistant\n")
# Every value is short, so that an answer that is made of random tokens ends.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
}
TOOLS = [{"name": name, "description": "Weather.", "input_schema": SCHEMA} for name in ("look", "guess")]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        thinker = {"model": "thinker", "from": "tiny", "template": THINKER, "stream": False}
        assert running.post("/api/create", thinker).json() == {"status": "success"}
        yield running


def post(daemon: Daemon, **fields: Any) -> httpx2.Response:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 400, "temperature": 0} | fields
    return daemon.http.post("/v1/messages", json=body, headers={"x-api-key": "any", "anthropic-version": "2023-06-01"})


def message(daemon: Daemon, **fields: Any) -> dict[str, Any]:
    answer = post(daemon, **fields)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    assert (parsed["type"], parsed["role"]) == ("message", "assistant")
    return parsed


def events_of(text: str) -> list[dict[str, Any]]:
    result = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        result.append(event)
    return result


def streamed(daemon: Daemon, **fields: Any) -> list[dict[str, Any]]:
    answer = post(daemon, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream"
    return events_of(answer.text)


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream tells of, by the rules of its events' order."""
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    made: dict[str, Any] = first["message"]
    assert (made["content"], made["stop_reason"]) == ([], None)
    partial: list[str] | None = None
    for event in middle:
        kind = event["type"]
        if kind == "ping":
            continue
        if kind == "content_block_start":
            assert partial is None
            assert event["index"] == len(made["content"])
            made["content"].append(event["content_block"])
            partial = []
            continue
        assert event["index"] == len(made["content"]) - 1
        assert partial is not None
        block = made["content"][-1]
        if kind == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = json.loads("".join(partial) or "{}")
            partial = None
            continue
        assert kind == "content_block_delta"
        (key,) = set(event["delta"]) - {"type"}
        if key == "partial_json":
            partial.append(event["delta"][key])
        else:
            block[key] += event["delta"][key]
    assert partial is None
    made |= delta["delta"]
    made["usage"] |= delta["usage"]
    return made


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two messages say the same; their ids differ."""

    def plain(message: dict[str, Any]) -> Any:
        content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
        return content, message["stop_reason"], message["stop_sequence"], message["usage"]["output_tokens"]

    return bool(plain(one) == plain(other))


# --- messages --------------------------------------------------------------------------------------------------------


def test_a_message_and_its_stream(daemon: Daemon) -> None:
    whole = message(daemon, max_tokens=12)
    assert whole["id"].startswith("msg_")
    assert [block["type"] for block in whole["content"]] == ["text"]
    assert (whole["model"], whole["stop_reason"], whole["stop_sequence"]) == ("tiny", "max_tokens", None)
    assert whole["usage"]["output_tokens"] == 12
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == N_HELLO
    events = streamed(daemon, max_tokens=12)
    made = put_together(events)
    assert same(made, whole)
    assert "ping" in [event["type"] for event in events]
    assert made["usage"]["input_tokens"] + made["usage"]["cache_read_input_tokens"] == N_HELLO
    told = [events[0]["message"]["usage"], events[-2]["usage"]]
    assert told[0]["cache_read_input_tokens"] == told[1]["cache_read_input_tokens"]


def test_the_headers_name_the_request(daemon: Daemon) -> None:
    answer = post(daemon, max_tokens=1)
    assert answer.headers["request-id"] == answer.headers["x-localrun-request"]
    row = daemon.http.get(f"/localrun/v1/requests/{answer.headers['request-id']}").json()
    assert (row["api"], row["state"]) == ("/v1/messages", "done")


def test_max_tokens_zero_reads_the_prompt() -> None:
    asked = [{"role": "user", "content": "warm this up"}]
    # Steps that take no time cost less than copying what is cached, and on a busy machine are repeated for that.
    with running_daemon(LOCALRUN_FAKE_STEP_MS="5") as daemon:
        empty = message(daemon, messages=asked, max_tokens=0)
        assert (empty["content"], empty["stop_reason"], empty["usage"]["output_tokens"]) == ([], "max_tokens", 0)
        assert message(daemon, messages=asked, max_tokens=1)["usage"]["input_tokens"] < empty["usage"]["input_tokens"]


def test_a_stop_sequence_is_named(daemon: Daemon) -> None:
    text = message(daemon, max_tokens=60)["content"][0]["text"]
    stop = text[10:13]
    for stopped in (
        message(daemon, stop_sequences=["no such text", stop]),
        put_together(streamed(daemon, stop_sequences=["no such text", stop])),
    ):
        assert stopped["content"][0]["text"] == text[: text.index(stop)]
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)


def test_the_end_of_a_turn(daemon: Daemon) -> None:
    for turn in range(60):
        ended = message(daemon, messages=[{"role": "user", "content": f"question {turn}"}])
        if ended["usage"]["output_tokens"] < 400:
            assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)
            return
    pytest.fail("no answer came to its end")


def test_the_end_of_the_context_is_not_the_limit_of_the_answer(daemon: Daemon) -> None:
    fields: dict[str, Any] = {"ignore_eos": True, "messages": [{"role": "user", "content": "x" * (N_CTX - 100)}]}
    assert message(daemon, max_tokens=1000, **fields)["stop_reason"] == "model_context_window_exceeded"
    assert message(daemon, max_tokens=10, **fields)["stop_reason"] == "max_tokens"


def test_sampling_fields(daemon: Daemon) -> None:
    def text(**fields: Any) -> str:
        return str(message(daemon, max_tokens=20, **fields)["content"][0]["text"])

    greedy = text(temperature=0)
    assert text(temperature=0, seed=7) == greedy
    assert len({text(temperature=1, seed=seed) for seed in range(1, 5)}) == 4
    assert text(temperature=1, seed=3) == text(temperature=1, seed=3)
    assert post(daemon, top_k=5, top_p=0.9, max_tokens=1).status_code == 200
    for field, wrong in (("top_k", -2), ("top_p", 1.5), ("temperature", -1)):
        assert post(daemon, **{field: wrong}).json()["error"]["message"].startswith(field)


# --- prompts ---------------------------------------------------------------------------------------------------------


def count(daemon: Daemon, **fields: Any) -> int:
    body = {"model": "tiny", "messages": HELLO} | fields
    answer = daemon.http.post("/v1/messages/count_tokens?beta=true", json=body)
    assert answer.status_code == 200, answer.text
    assert list(answer.json()) == ["input_tokens"]
    return int(answer.json()["input_tokens"])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "be brief"},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        {"messages": [*HELLO, {"role": "assistant", "content": "Well,"}]},
        {"model": "thinker", "thinking": {"type": "enabled", "budget_tokens": 1}},
    ],
)
def test_what_is_counted_is_what_is_read(daemon: Daemon, fields: dict[str, Any]) -> None:
    usage = message(daemon, max_tokens=2, **fields)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count(daemon, **fields)


def test_system_tools_and_results_are_part_of_the_prompt(daemon: Daemon) -> None:
    plain = count(daemon)
    assert plain == N_HELLO
    assert count(daemon, system="be brief") == plain + len("<system\nbe brief>\n")
    assert count(daemon, tools=TOOLS) > plain + len("look") + len("guess")
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "22 degrees"}
    answered = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert count(daemon, messages=answered) > plain + len('{"city": "Paris"}') + len("22 degrees")
    failed = [*answered[:-1], {"role": "user", "content": [result | {"is_error": True}]}]
    assert count(daemon, messages=failed) == count(daemon, messages=answered) + len("Error: ")


def test_a_system_message_in_the_middle_leaves_the_cached_prefix_as_it_is() -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cch=fa690;"}
    kind = {"type": "text", "text": "be kind"}

    def n_computed(daemon: Daemon, number: int) -> list[int]:
        turns = [
            {"role": "user", "content": f"remember {number} " * 20},
            {"role": "assistant", "content": "I will"},
            {"role": "user", "content": "and now?"},
        ]
        more = [*turns, {"role": "assistant", "content": "Now"}, {"role": "system", "content": "be brief"}, turns[-1]]
        return [
            message(daemon, system=system, messages=messages, max_tokens=1)["usage"]["input_tokens"]
            for system, messages in (("be kind", turns), ("be kind", more), ([header, kind], more))
        ]

    with running_daemon() as daemon:
        n_after = len("Now>\n<system\nbe brief>\n<user\nand now?>\n<assistant\n")
        # An engine may find it quicker to compute a prefix again; never that it differs.
        assert any(n_computed(daemon, number)[1:] == [n_after, 1] for number in range(10))


def test_an_answer_that_was_begun_goes_on(daemon: Daemon) -> None:
    whole = message(daemon, max_tokens=20, ignore_eos=True)["content"][0]["text"]
    begun = [*HELLO, {"role": "assistant", "content": whole[:5]}]
    rest = message(daemon, messages=begun, max_tokens=20, ignore_eos=True)["content"][0]["text"]
    if whole[:5].isascii():  # the fake engine writes halves of characters too, which no text can stand for
        assert (whole[:5] + rest).startswith(whole)


def test_a_schema_holds_the_answer(daemon: Daemon) -> None:
    made = message(daemon, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert set(json.loads(made["content"][0]["text"])) == {"city", "warm"}


# --- tools and thinking ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "names"), [({"type": "any"}, {"look", "guess"}), ({"type": "tool", "name": "guess"}, {"guess"})]
)
def test_a_call_that_must_be_made(daemon: Daemon, choice: dict[str, Any], names: set[str]) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice | {"disable_parallel_tool_use": True}}
    whole = message(daemon, **fields)
    (block,) = whole["content"]
    assert (block["type"], whole["stop_reason"]) == ("tool_use", "tool_use")
    assert block["name"] in names
    assert block["id"].startswith("toolu_")
    assert set(block["input"]) == {"city", "warm"}
    events = streamed(daemon, **fields)
    assert same(put_together(events), whole)
    assert sum(event["type"] == "content_block_delta" for event in events) > 3, "as they come"


def test_parallel_calls_may_be_forbidden(daemon: Daemon) -> None:
    def n_calls(seed: int, **choice: Any) -> int:
        fields: dict[str, Any] = {"seed": seed, "temperature": 1, "max_tokens": 600}
        return len(message(daemon, tools=TOOLS, tool_choice={"type": "any"} | choice, **fields)["content"])

    seed = next((seed for seed in range(1, 40) if n_calls(seed) > 1), None)
    assert seed is not None, "no seed made two calls"
    assert n_calls(seed, disable_parallel_tool_use=True) == 1


def test_no_call_where_none_is_wanted(daemon: Daemon) -> None:
    made = message(daemon, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=30)
    assert same(made, message(daemon, max_tokens=30))


def test_thinking_has_blocks_of_its_own(daemon: Daemon) -> None:
    thinking = {"type": "enabled", "budget_tokens": 10}
    fields: dict[str, Any] = {"model": "thinker", "max_tokens": 20}
    whole = message(daemon, thinking=thinking, **fields)
    (block,) = whole["content"]
    assert block["type"] == "thinking"
    assert block["thinking"]
    assert block["signature"]
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] == 20
    assert same(put_together(streamed(daemon, thinking=thinking, **fields)), whole)
    (unseen,) = message(daemon, thinking=thinking | {"display": "omitted"}, **fields)["content"]
    assert unseen == block | {"thinking": ""}
    back = [*HELLO, {"role": "assistant", "content": [block, {"type": "text", "text": "yes"}]}, *HELLO]
    without = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}, *HELLO]
    more = count(daemon, model="thinker", messages=back) - count(daemon, model="thinker", messages=without)
    assert more == len(f"({block['thinking']})".encode())


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
def test_no_thinking_unless_it_is_asked_for(daemon: Daemon, thinking: Any) -> None:
    made = message(daemon, model="thinker", thinking=thinking, max_tokens=10)
    assert [block["type"] for block in made["content"]] == ["text"]


def test_a_model_that_does_not_think_answers_and_says_so(daemon: Daemon) -> None:
    answer = post(daemon, thinking={"type": "enabled", "budget_tokens": 2}, max_tokens=5)
    assert answer.headers["x-localrun-ignored"] == "thinking: this model does not support thinking"
    assert [block["type"] for block in answer.json()["content"]] == ["text"]
    assert "x-localrun-ignored" not in post(daemon, max_tokens=5).headers


def test_the_shape_of_claude_code_s_requests(daemon: Daemon) -> None:
    """As it sends them: with everything that only Anthropic knows, and schemas with keywords that nothing enforces."""
    ephemeral = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command"},
            "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 9007199254740991},
            "todos": {
                "type": "array",
                "items": {"type": "object", "properties": {"status": {"type": "string", "enum": ["a", "b"]}}},
            },
            "env": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        },
        "required": ["command"],
        "additionalProperties": False,
    }
    call = {
        "type": "tool_use",
        "id": "toolu_01",
        "name": "Bash",
        "input": {"command": "ls"},
        "caller": {"type": "direct"},
    }
    result = {"type": "tool_result", "tool_use_id": "toolu_01", "content": "README.md", "is_error": False} | ephemeral
    body = {
        "model": "tiny",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=fa690;"},
            {"type": "text", "text": "You are a coder."} | ephemeral,
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
            {"role": "user", "content": [{"type": "text", "text": "what is here?"} | ephemeral]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "<system-reminder>y</system-reminder>"}]},
            {"role": "system", "content": "The date has changed."},
        ],
        "tools": [
            {"name": name, "description": "Does it.", "input_schema": schema, "eager_input_streaming": True}
            for name in ("Bash", "mcp__server__tool")
        ],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_x_account__session_y"},
        "temperature": 1,
    }
    headers = {
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "anthropic-version": "2023-06-01",
        "authorization": "Bearer x",
        "user-agent": "claude-cli/2.1 (external, cli)",
    }
    with daemon.http.stream("POST", "/v1/messages?beta=true", json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert next(response.iter_lines()) == "event: message_start"
    count = {name: body[name] for name in ("model", "messages", "system", "tools")}
    counted = daemon.http.post("/v1/messages/count_tokens?beta=true", json=count, headers=headers)
    assert counted.json()["input_tokens"] > 500


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("fields", "status", "type_", "said"),
    [
        ({"model": "no-such-model"}, 404, "not_found_error", "no-such-model"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": "hi"}, 400, "invalid_request_error", "messages"),
        ({"lane": "first"}, 400, "invalid_request_error", "lane"),
    ],
)
def test_errors_have_anthropic_s_shape(
    daemon: Daemon, path: str, fields: dict[str, Any], status: int, type_: str, said: str
) -> None:
    answer = daemon.post(path, {"model": "tiny", "messages": HELLO, "max_tokens": 5} | fields)
    assert answer.status_code == status
    assert set(answer.json()) == {"type", "error", "request_id"}
    assert answer.json()["error"]["type"] == type_
    assert said in answer.json()["error"]["message"]
    assert answer.headers["x-localrun-error"]


def test_errors_before_any_route(daemon: Daemon) -> None:
    for answer, status in (
        (daemon.http.get("/v1/messages"), 405),
        (daemon.http.post("/v1/messages/nothing", json={}), 404),
        (
            daemon.http.post(
                "/v1/messages", content=b"{}", headers={"origin": daemon.url, "content-type": "text/plain"}
            ),
            415,
        ),
        (daemon.http.post("/v1/messages", json={}, headers={"host": "evil.example"}), 403),
    ):
        assert answer.status_code == status
        assert answer.json()["type"] == "error"


def test_a_prompt_that_is_too_long_is_refused_before_the_stream(daemon: Daemon) -> None:
    answer = post(daemon, messages=[{"role": "user", "content": "x" * 3 * N_CTX}], stream=True)
    assert answer.status_code == 400
    assert re.match(rf"prompt is too long: \d+ tokens > {N_CTX} maximum; ", answer.json()["error"]["message"])
    assert answer.headers["x-localrun-error"] == "context_length_exceeded"


def test_a_schema_that_nothing_can_be_held_to_is_named_as_the_client_knows_it(daemon: Daemon) -> None:
    tool = {"name": "look", "input_schema": {"type": "object", "properties": {"a": {"minLenght": 1}}}}
    error = post(daemon, tools=[tool], tool_choice={"type": "any"}).json()["error"]
    assert error["message"].startswith("tools[0].input_schema.properties.a: ")


def test_an_error_in_the_middle_is_an_event() -> None:
    with running_daemon(LOCALRUN_RESUME="off", LOCALRUN_FAKE_STEP_MS="10") as daemon:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 1500, "stream": True, "ignore_eos": True}
        with daemon.http.stream("POST", "/v1/messages", json=body) as response:
            parts = response.iter_text()
            text = next(parts)
            pid = daemon.http.get("/localrun/v1/snapshot").json()["engines"][0]["pid"]
            os.kill(pid, signal.SIGKILL)
            text += "".join(parts)
        last = events_of(text)[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        with daemon.http.stream("POST", "/v1/messages", json=body) as response:
            next(response.iter_text())
            request_id = response.headers["request-id"]
        deadline_s = time.monotonic() + 30
        while (row := daemon.http.get(f"/localrun/v1/requests/{request_id}").json())["state"] != "cancelled":
            assert time.monotonic() < deadline_s, row
            time.sleep(0.02)
