"""Output items and their events, in OpenAI's order."""

from __future__ import annotations

import json
from typing import Any

from localrun.server.openai.responses.output import Events, Output
from localrun.wire import ChosenLogprob, Finish
from tests.server.openai.stub_parser import delta, reply

WORD = ChosenLogprob(9, b"word", -0.1, ())


def run(*texts: str, summarizes: bool = False, status: str = "completed") -> tuple[list[dict[str, Any]], Output]:
    output, said = Output(Events(), {}, summarizes=summarizes), reply()
    data = b""
    for text in texts:
        data += output.take(said.take(delta(text)), [WORD])
    data += output.take(said.take(delta("", Finish.STOP)), None) + output.finish(status=status)
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, _, body = block.partition("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events, output


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_message() -> None:
    events, output = run("one ", "two")
    assert kinds(events) == [
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
    ]  # fmt: skip
    added, part, first, _, text_done, part_done, item_done = events
    assert added["item"] == {
        "id": added["item"]["id"], "type": "message", "status": "in_progress", "role": "assistant", "content": [],
    }  # fmt: skip
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert (first["delta"], first["item_id"], first["output_index"], first["content_index"]) == (
        "one ", added["item"]["id"], 0, 0,
    )  # fmt: skip
    assert first["logprobs"][0]["token"] == "word"
    assert text_done["text"] == "one two"
    assert len(text_done["logprobs"]) == 2
    assert part_done["part"]["text"] == "one two"
    assert item_done["item"]["status"] == "completed"
    assert output.items == [item_done["item"]]


def test_thinking_then_content_then_calls() -> None:
    events, output = run("<t>why</t>", "so", '<c f>{"x"', ":1}</c>", "<c g>{}</c>")
    assert kinds(events) == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    assert [event["output_index"] for event in events if event["type"].endswith("item.added")] == [0, 1, 2, 3]
    reasoning, message, call, other = output.items
    assert (reasoning["type"], reasoning["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "why"}])
    assert reasoning["summary"] == []
    assert message["content"][0]["text"] == "so"
    assert (call["type"], call["call_id"], call["name"], call["arguments"]) == (
        "function_call", "call_0", "f", '{"x":1}',
    )  # fmt: skip
    assert (other["name"], other["arguments"]) == ("g", "{}")
    assert len({item["id"] for item in output.items}) == 4


def test_thinking_as_a_summary_where_that_was_asked_for() -> None:
    events, output = run("<t>why</t>", "so", summarizes=True)
    assert kinds(events)[:6] == [
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
    ]  # fmt: skip
    assert events[2]["summary_index"] == 0
    assert output.items[0]["summary"] == [{"type": "summary_text", "text": "why"}]


def test_no_word_is_an_empty_message() -> None:
    events, output = run()
    assert kinds(events)[0] == "output_item.added"
    assert output.items[0]["content"][0]["text"] == ""


def test_what_was_cut_off_is_incomplete() -> None:
    _, output = run("one", '<c f>{"x"', status="incomplete")
    assert [item["status"] for item in output.items] == ["completed", "incomplete"]


def test_content_after_a_call_is_another_message() -> None:
    _, output = run("a", "<c f>{}</c>", "b")
    assert [item["type"] for item in output.items] == ["message", "function_call", "message"]
