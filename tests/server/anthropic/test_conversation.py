"""Anthropic's messages as templates want them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrun.errors import BadRequest
from localrun.server import notices
from localrun.server.anthropic.body import CountBody
from localrun.server.http.exchange import decode_body


def conversation(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    content = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    return list(decode_body(content, CountBody).ask().messages)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def test_texts_and_blocks() -> None:
    said = [text("a"), text("b")]
    assert conversation(user("hi")) == conversation(user([text("hi")])) == [{"role": "user", "content": "hi"}]
    assert conversation(user(said), {"role": "assistant", "content": said}, user("x")) == [
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "a\n\nb"},
        {"role": "user", "content": "x"},
    ]


def test_a_system_prompt_and_one_in_the_middle() -> None:
    messages = [user("a"), {"role": "system", "content": [text("now be brief")]}, user("b")]
    expected = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a"},
        {"role": "system", "content": "now be brief"},
        {"role": "user", "content": "b"},
    ]
    assert conversation(*messages, system="be kind") == expected
    assert conversation(*messages, system=[text("be kind")]) == expected
    assert conversation(*messages, system=[]) == expected[1:]


@pytest.mark.parametrize("after", [[], [text("and then")]])
def test_what_a_service_made_a_summary_of_is_left_to_it(after: list[dict[str, Any]]) -> None:
    summary = {"type": "compaction", "content": "We built a shed."}
    picture = {"type": "image", "source": {"type": "base64", "data": "no picture"}}
    turns = [user([picture]), {"role": "assistant", "content": [text("a"), summary, *after]}, user("b")]
    answered = [{"role": "assistant", "content": "and then"}] if after else []
    made = [{"role": "user", "content": "We built a shed."}, *answered, {"role": "user", "content": "b"}]
    assert conversation(*turns, system="S") == [{"role": "system", "content": "S"}, *made]
    assert conversation({"role": "assistant", "content": [summary]}, *turns) == made


def test_a_summary_that_is_none_takes_nothing_away() -> None:
    turns = [user("a"), {"role": "assistant", "content": [{"type": "compaction", "content": None}, text("b")]}]
    assert [message["content"] for message in conversation(*turns)] == ["a", "b"]


def test_what_changes_with_every_request_is_no_part_of_the_prompt() -> None:
    def asked(nonce: str) -> list[dict[str, Any]]:
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};"
        return conversation(user("a"), system=[text(header), text("You are a coder.")])

    assert asked("fa690") == asked("0aaa9") == conversation(user("a"), system="You are a coder.")
    as_text = "x-anthropic-billing-header: cch=1;\nYou are a coder."
    assert conversation(user("a"), system=as_text) == asked("1")


def test_calls_thinking_and_results() -> None:
    assert conversation(
        user("is it warm?"),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "zzz"},
                text("I look."),
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "toolu_2", "name": "guess", "input": {}},
            ],
        },
        user(
            [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "22"},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": [text("a"), text("b")], "is_error": True},
                text("and tomorrow?"),
            ]
        ),
    )[1:] == [
        {
            "role": "assistant", "content": "I look.", "thinking": "hm",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": {"city": "Paris"}}},
                {"id": "toolu_2", "type": "function", "function": {"name": "guess", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "", "content": "22"},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "", "content": "Error: a\n\nb"},
        {"role": "user", "content": "and tomorrow?"},
    ]  # fmt: skip


def test_documents_and_search_results_are_read_where_they_are_text() -> None:
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    parts = {"type": "document", "source": {"type": "content", "content": [text("D")]}}
    found = {"type": "search_result", "title": "T", "source": "https://x", "content": [text("D")]}
    assert [message["content"] for message in conversation(user([plain]), user([parts]), user([found]))] == [
        "T\nD", "D", "T\nhttps://x\nD",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ([{"type": "image", "source": {"type": "base64"}}], "messages[0].content[0].source.data"),
        ([{"type": "image", "source": {"type": "file", "file_id": "f"}}], "messages[0].content[0].source.type"),
        ([{"type": "search_result", "content": [{"type": "image"}]}], "messages[0].content[0].content[0]"),
        ([text("a"), {"type": "video", "source": {}}], "messages[0].content[1].type"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ([{"type": "tool_result", "content": "x"}], "messages[0].content[0].tool_use_id"),
        ([{"type": "document", "source": {"type": "base64", "data": "aGk="}}], "messages[0].content[0].source"),
        ([{"type": "document", "source": "x"}], "messages[0].content[0].source"),
        (
            [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}],
            "messages[0].content[0].content[0].source.type",
        ),
    ],
)
def test_what_cannot_be_read_is_named(content: Any, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        conversation(user(content))
    assert caught.value.field == field


def test_blocks_that_nobody_has_heard_of_are_left_out_where_they_hold_nothing_to_read() -> None:
    fallback = {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}
    turns = [
        user([{"type": "of_2027", "on": True}, text("a")]),
        {"role": "assistant", "content": [fallback, text("b")]},
    ]
    with notices.collected() as left_out:
        assert [message["content"] for message in conversation(*turns, user("c"))] == ["a", "b", "c"]
    assert left_out == ["messages[0].content[0] (of_2027)", "messages[1].content[0] (fallback)"]


def test_a_role_that_is_none_and_no_messages() -> None:
    with pytest.raises(BadRequest, match=r"messages\[0\]\.role"):
        conversation({"role": "robot", "content": "x"})
    with pytest.raises(BadRequest, match="at least one"):
        conversation()
