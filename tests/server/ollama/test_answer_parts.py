"""Pieces of replies as parts of answers."""

from __future__ import annotations

from localrun.server.ollama import answer_parts
from localrun.server.ollama.answer_parts import Parts
from localrun.server.ollama.lines import Said
from localrun.server.parsing.pieces import CallArguments, CallStart, Content, Piece, Thinking

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
    assert answer_parts.joined(parts) == Said("so", "hm", [LOOK, GUESS])
