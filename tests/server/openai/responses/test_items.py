"""Items of a conversation, and the messages that they make."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.server.http.exchange import decode_body
from localrun.server.openai.responses import items as response_items
from localrun.server.openai.responses.body import ResponsesBody
from localrun.server.prompting.ask import MAX_MESSAGES

CALL = {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": '{"word":"x"}'}


def items(sent: Any, known: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    return response_items.items_of(sent, (known or {}).get)


def messages(*sent: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return response_items.messages_of(instructions, items(list(sent)))


def test_a_text_is_the_user_s_message() -> None:
    (item,) = items("hi")
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"]) == ("message", "user")
    assert item["content"] == [{"type": "input_text", "text": "hi"}]
    assert response_items.messages_of("be brief", [item]) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_messages_with_and_without_a_type() -> None:
    assert messages(
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    ) == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]


def test_the_items_of_one_turn_are_one_message() -> None:
    made = messages(
        {"role": "user", "content": "u"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "one moment"},
        CALL,
        CALL | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "too"}]},
        {"role": "assistant", "content": "there"},
    )
    assert [message["role"] for message in made] == ["user", "assistant", "tool", "tool", "assistant"]
    turn = made[1]
    assert (turn["content"], turn["thinking"]) == ("one moment", "hm")
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert turn["tool_calls"][0]["function"] == {"name": "look_up", "arguments": {"word": "x"}}
    assert made[2] == {"role": "tool", "content": "found", "tool_call_id": "c1", "name": "look_up"}
    assert made[3]["content"] == "too"


def test_a_summary_stands_for_thinking_that_did_not_come_along() -> None:
    made = messages(
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": "a"},
    )
    assert made == [{"role": "assistant", "content": "a", "thinking": "hm"}]


@pytest.mark.parametrize("parts", [None, 5, "x", [1], [{"text": 2}]])
def test_reasoning_without_text_is_no_thinking(parts: Any) -> None:
    made = messages({"type": "reasoning", "content": parts, "summary": parts}, {"role": "assistant", "content": "a"})
    assert made == [{"role": "assistant", "content": "a"}]


def test_a_turn_ends_where_the_next_one_thinks() -> None:
    made = messages(CALL, {"type": "reasoning", "summary": []}, {"role": "assistant", "content": "a"})
    assert [(message["content"], "tool_calls" in message) for message in made] == [("", True), ("a", False)]


def test_references_are_replaced() -> None:
    known = {"msg_1": {"id": "msg_1", "type": "message", "role": "user", "content": []}}
    assert items([{"type": "item_reference", "id": "msg_1"}], known) == [known["msg_1"]]
    with pytest.raises(BadRequest, match="msg_2") as caught:
        items([{"type": "item_reference", "id": "msg_2"}], known)
    assert caught.value.field == "input[0].id"


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ([], "input"),
        ("x", None),
        ([{}], "input[0].type"),
        ([{"type": "web_search_call"}], "input[0].type"),
        ([{"role": "robot", "content": "x"}], "input[0].role"),
        ([{"role": ["user"], "content": "x"}], "input[0].role"),
        ([{"type": {}, "content": "x"}], "input[0].type"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": ["x"]}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0]"),
        ([CALL | {"name": 1}], "input[0].name"),
        ([CALL | {"arguments": "{"}], "input[0].arguments"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
        ([{"type": "function_call_output", "call_id": "c", "output": 1}], "input[0].output"),
    ],
)
def test_a_bad_item_is_named(sent: Any, field: str | None) -> None:
    if field is None:
        assert items(sent)
        return
    with pytest.raises(BadRequest) as caught:
        response_items.messages_of(None, items(sent))
    assert caught.value.field == field


def test_a_conversation_has_a_most_of_items() -> None:
    def response(n_items: int) -> ResponsesBody:
        sent = [{"role": "user", "content": "hi"}] * n_items
        return decode_body(json.dumps({"model": "m", "input": sent}).encode(), ResponsesBody)

    assert len(response(MAX_MESSAGES).input) == MAX_MESSAGES
    with pytest.raises(BadRequest, match=f"{MAX_MESSAGES}") as wrong:
        response(MAX_MESSAGES + 1)
    assert wrong.value.field == "input"
