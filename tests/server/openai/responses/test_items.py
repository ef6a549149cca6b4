"""Items of a conversation, and the messages that they make."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.server.http.exchange import decode_body
from localrun.server.openai.responses import items as response_items
from localrun.server.openai.responses.create import ResponsesBody
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
        ("x", None),
        ([{}], "input[0].type"),
        ([{"role": "a robot", "content": "x"}], "input[0].role"),
        ([{"role": ["user"], "content": "x"}], "input[0].role"),
        ([{"type": {}, "content": "x"}], "input[0].type"),
        ([{"role": "user"}], None),
        ([{"role": "user", "content": 1}], "input[0].content"),
        ([{"role": "user", "content": ["x"]}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0]"),
        ([CALL | {"name": 1}], "input[0].name"),
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


# Of conversations that were begun elsewhere: each between two messages.
FOREIGN: list[tuple[dict[str, Any], list[Any]]] = [
    (
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        [("apply_patch", {"input": "*** Begin"})],
    ),
    (
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        [("local_shell", {"type": "exec", "command": ["ls"]})],
    ),
    ({"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}, [("shell", {"commands": ["ls"]})]),
    (
        {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
        [("apply_patch", {"type": "delete_file", "path": "a"})],
    ),
    ({"type": "tool_search_call", "call_id": "c", "arguments": {"query": "x"}}, [("tool_search", {"query": "x"})]),
    (
        {"type": "function_call", "call_id": "c", "namespace": "mcp__wx", "name": "now", "arguments": "{}"},
        [("mcp__wx__now", {})],
    ),
    ({"type": "custom_tool_call_output", "call_id": "c", "output": "done"}, ["done"]),
    ({"type": "function_call_output", "call_id": "c", "output": None}, [""]),
    ({"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "done"}]}, ["done"]),
    ({"type": "local_shell_call_output", "call_id": "c", "output": "a.py"}, ["a.py"]),
    ({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a.py"}]}, ['[{"stdout": "a.py"}]']),
    (
        {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function", "name": "found"}]},
        ['[{"type": "function", "name": "found"}]'],
    ),
    ({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}, []),
    ({"type": "image_generation_call", "id": "ig_1", "result": "aGVsbG8="}, []),
    ({"type": "mcp_call", "id": "mcp_1", "name": "x", "arguments": "{}", "output": "y"}, []),
    ({"type": "compaction", "encrypted_content": "gAAAA"}, []),
    ({"type": "additional_tools", "tools": [{"type": "function", "name": "found"}]}, []),
    ({"type": "something_of_2027", "content": [1, {"deep": []}]}, []),
]


@pytest.mark.parametrize(("item", "expected"), FOREIGN, ids=[item["type"] for item, _ in FOREIGN])
def test_items_that_no_model_here_makes_are_read_or_left_out(item: dict[str, Any], expected: list[Any]) -> None:
    user = [{"role": "user", "content": text} for text in ("before", "after")]
    sent = items([user[0], item, user[1]])
    assert all(each["id"] for each in sent)
    first, *middle, last = response_items.messages_of(None, sent)
    assert (first["content"], last["content"]) == ("before", "after")
    seen: list[Any] = []
    for message in middle:
        calls = message.get("tool_calls", ())
        seen += [(call["function"]["name"], call["function"]["arguments"]) for call in calls] or [message["content"]]
    assert seen == expected
    left_out = response_items.left_out(sent)
    assert left_out == ([] if expected or item.get("tools") else [f"input[1] ({item['type']})"])


def test_tools_that_come_as_items_are_offered() -> None:
    found = [{"type": "function", "name": "found"}]
    sent = items(
        [{"type": "tool_search_output", "call_id": "c", "tools": found}, {"type": "additional_tools", "tools": found}]
    )
    assert response_items.tools_in(sent) == found * 2
