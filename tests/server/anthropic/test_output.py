"""Pieces of replies as blocks and their events."""

from __future__ import annotations

import json
from typing import Any

from localrun.server.anthropic.messages import Output, signature
from localrun.server.parsing.pieces import CallArguments, CallStart, Content, Piece, Thinking

PIECES: list[Piece] = [
    Thinking("h"), Thinking("m"), Content("so "), Content("\u2028\""), CallStart(0, "call_a", "look"),
    CallArguments(0, '{"city": '), CallArguments(0, '"Paris"}'), CallStart(1, "call_b", "guess"), Content("end"),
]  # fmt: skip


def events(told: bytes) -> list[dict[str, Any]]:
    result = []
    for block in told.decode().split("\n\n")[:-1]:
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        result.append(event)
    return result


def told_of(pieces: list[Piece], *, one_by_one: bool, **how: Any) -> tuple[list[dict[str, Any]], Output]:
    output = Output(**how)
    parts = [[piece] for piece in pieces] if one_by_one else [pieces]
    told = b"".join(output.take(part) for part in parts)
    return events(told + output.finish()), output


def test_blocks_are_opened_and_closed_in_order() -> None:
    one, _ = told_of(PIECES, one_by_one=True)
    assert one == told_of(PIECES, one_by_one=False)[0]
    assert [
        (event["type"].removeprefix("content_block_"), event["index"], event.get("delta", {}).get("type"))
        for event in one
    ] == [
        ("start", 0, None), ("delta", 0, "thinking_delta"), ("delta", 0, "thinking_delta"),
        ("delta", 0, "signature_delta"), ("stop", 0, None),
        ("start", 1, None), ("delta", 1, "text_delta"), ("delta", 1, "text_delta"), ("stop", 1, None),
        ("start", 2, None), ("delta", 2, "input_json_delta"), ("delta", 2, "input_json_delta"), ("stop", 2, None),
        ("start", 3, None), ("stop", 3, None),
        ("start", 4, None), ("delta", 4, "text_delta"), ("stop", 4, None),
    ]  # fmt: skip
    starts = [event["content_block"] for event in one if event["type"] == "content_block_start"]
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "toolu_a", "name": "look", "input": {}},
        {"type": "tool_use", "id": "toolu_b", "name": "guess", "input": {}},
        {"type": "text", "text": ""},
    ]


def test_the_blocks_are_what_the_events_add_up_to() -> None:
    told, output = told_of(PIECES, one_by_one=True)
    sums: dict[int, str] = {}
    for event in told:
        delta = event.get("delta", {})
        added = delta.get("text", "") + delta.get("thinking", "") + delta.get("partial_json", "")
        sums[event["index"]] = sums.get(event["index"], "") + added
    assert output.blocks() == [
        {"type": "thinking", "thinking": sums[0], "signature": signature("hm")},
        {"type": "text", "text": sums[1]},
        {"type": "tool_use", "id": "toolu_a", "name": "look", "input": json.loads(sums[2])},
        {"type": "tool_use", "id": "toolu_b", "name": "guess", "input": {}},
        {"type": "text", "text": sums[4]},
    ]


def test_a_call_that_was_cut_off_is_left_out() -> None:
    _, output = told_of([Content("x"), CallStart(0, "call_a", "look"), CallArguments(0, '{"ci')], one_by_one=True)
    assert output.blocks() == [{"type": "text", "text": "x"}]


def test_thinking_that_is_not_shown_has_its_signature() -> None:
    told, output = told_of([Thinking("hm"), Content("x")], one_by_one=True, omits_thinking=True)
    assert [event["delta"]["type"] for event in told if "delta" in event] == ["signature_delta", "text_delta"]
    assert output.blocks()[0] == {"type": "thinking", "thinking": "", "signature": signature("hm")}


def test_no_pieces_are_no_blocks() -> None:
    told, output = told_of([], one_by_one=False)
    assert (told, output.blocks()) == ([], [])
