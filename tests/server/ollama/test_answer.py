"""Lines of /api streams."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from localrun.server.ollama import chat
from localrun.server.ollama.chat import Lines, Parts, Said, joined
from localrun.server.parsing.pieces import CallArguments, CallStart, Content, Piece, Thinking
from localrun.wire import ChosenLogprob, TokenLogprob, Usage

USAGE = Usage(n_prompt=10, n_cached=4, n_output=3, queued_s=0.5, prefill_s=0.25, decode_s=0.125)


def test_a_chat_line() -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    line = Lines('a"b', is_chat=True).text('say "é"\n\u2028\x00')
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    parsed = json.loads(line)
    created_at = datetime.fromisoformat(parsed.pop("created_at"))
    assert before <= created_at <= datetime.now(UTC)
    assert parsed == {
        "model": 'a"b',
        "message": {"role": "assistant", "content": 'say "é"\n\u2028\x00'},
        "done": False,
    }


def test_a_generate_line() -> None:
    parsed = json.loads(Lines("m", is_chat=False).text("hi"))
    assert (parsed["response"], parsed["done"]) == ("hi", False)
    assert "message" not in parsed


def test_thinking_and_calls_are_in_a_chat_s_message_and_beside_a_response() -> None:
    call = {"id": "c", "function": {"index": 0, "name": "look", "arguments": {}}}
    for said, expected in (
        (Said(thinking="hm"), {"thinking": "hm"}),
        (Said(tool_calls=(call,)), {"tool_calls": [call]}),
    ):
        chat = json.loads(Lines("m", is_chat=True).part(said))
        assert chat["message"] == {"role": "assistant", "content": ""} | expected
        generate = json.loads(Lines("m", is_chat=False).part(said))
        assert {key: generate[key] for key in ("response", *expected)} == {"response": ""} | expected
        assert (chat["done"], generate["done"]) == (False, False)


def test_the_last_line() -> None:
    metrics = chat.figures(USAGE, load_s=2, total_s=3)
    parsed = json.loads(Lines("m", is_chat=True).end("stop", metrics))
    assert parsed["message"] == {"role": "assistant", "content": ""}
    assert (parsed["done"], parsed["done_reason"]) == (True, "stop")
    assert parsed["total_duration"] == 3_000_000_000
    assert parsed["load_duration"] == 2_000_000_000
    assert (parsed["prompt_eval_count"], parsed["prompt_eval_cached_count"]) == (10, 4)
    assert (parsed["prompt_eval_duration"], parsed["eval_count"], parsed["eval_duration"]) == (
        250_000_000,
        3,
        125_000_000,
    )


def test_no_duration_that_clients_divide_by_is_zero() -> None:
    """One token has no time between tokens; llm and others compute count / duration."""
    one = Usage(n_prompt=1, n_cached=1, n_output=1, queued_s=0, prefill_s=0, decode_s=0)
    metrics = chat.figures(one, load_s=0, total_s=0)
    assert metrics["eval_duration"] > 0
    assert metrics["prompt_eval_duration"] > 0
    assert all(isinstance(value, int) for value in metrics.values())


def test_logprobs_carry_bytes() -> None:
    chosen = ChosenLogprob(7, b"\xc3", -0.5, (TokenLogprob(7, b"\xc3", -0.5), TokenLogprob(8, b"a", -1.0)))
    entry = json.loads(Lines("m", is_chat=False).text("", [chosen]))["logprobs"][0]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("\ufffd", -0.5, [195])
    assert entry["top_logprobs"][1] == {"token": "a", "logprob": -1.0, "bytes": [97]}


def test_the_time_is_utc_with_nanoseconds() -> None:
    assert chat.rfc3339(1_700_000_000_000_000_007) == b"2023-11-14T22:13:20.000000007Z"
    assert chat.rfc3339_now() <= chat.rfc3339_now()


LOOK = {"id": "c0", "function": {"index": 0, "name": "look", "arguments": {"city": "Paris"}}}
GUESS = {"id": "c1", "function": {"index": 1, "name": "guess", "arguments": {}}}


def test_calls_come_when_they_are_whole() -> None:
    parts = Parts()
    assert parts.take([Thinking("hm"), Content("so"), CallStart(0, "c0", "look")], is_end=False) == [
        Said(thinking="hm"), Said(text="so"),
    ]  # fmt: skip
    assert parts.take([CallArguments(0, '{"city": ')], is_end=False) == []
    assert parts.take([CallArguments(0, '"Paris"}')], is_end=False) == []
    assert parts.take([CallStart(1, "c1", "guess")], is_end=False) == [Said(tool_calls=(LOOK,))]
    assert parts.take([], is_end=True) == [Said(tool_calls=(GUESS,))]


def test_a_call_that_was_cut_off_is_left_out() -> None:
    cut: list[Piece] = [CallStart(0, "c0", "look"), CallArguments(0, '{"city": "Par')]
    assert Parts().take(cut, is_end=True) == []
    assert Parts().take([*cut, CallStart(1, "c1", "guess")], is_end=True) == [
        Said(tool_calls=({"id": "c1", "function": {"index": 0, "name": "guess", "arguments": {}}},))
    ]


def test_an_answer_is_the_sum_of_its_parts() -> None:
    parts = [
        Said(thinking="h"),
        Said(thinking="m"),
        Said(text="so"),
        Said(tool_calls=(LOOK,)),
        Said(tool_calls=(GUESS,)),
    ]
    assert joined(parts) == Said("so", "hm", [LOOK, GUESS])
