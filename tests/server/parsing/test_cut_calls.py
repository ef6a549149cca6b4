"""Calls that the limit of a reply cut off: they are left out, wherever that was."""

from __future__ import annotations

import json
from itertools import product

import pytest

from localrun.server.parsing import formats
from localrun.server.parsing.parser import CallFormat, ParserPlan
from localrun.server.parsing.pieces import CallArguments, CallStart, Content, Reply
from localrun.wire import Delta, Finish, Phase
from tests.server.parsing.golden import PARIS, SCHEMAS

WRITTEN = sorted(
    {value.name: value for value in vars(formats).values() if isinstance(value, CallFormat)}.values(),
    key=lambda known: known.name,
)
EACH = pytest.mark.parametrize("call_format", WRITTEN, ids=lambda known: known.name)
BEGUN = {
    "qwen-coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nIn </parameter> or </tool_call> or",
    "pythonic": '[get_weather(city="Pa',
    "lfm2": '<|tool_call_start|>[get_weather(city="Pa',
    "gemma": '<|tool_call>call:get_weather{city:<|"|>Pa',
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_va",
    "llama-json": '{"name": "get_weather", "parameters": {"city": "Pa',
}


def reply(plan: ParserPlan, text: str, finish: Finish) -> Reply:
    made = Reply(plan.parser(SCHEMAS))
    made.gather(delta(text))
    made.gather(delta("", finish))
    return made


def delta(text: str, finish: Finish | None = None) -> Delta:
    return Delta(id=1, phase=Phase.DECODE, n_computed=0, n_output=0, text=text, tokens=[], finish=finish)


@EACH
def test_a_forced_call_leaves_nothing_wherever_it_was_cut(call_format: CallFormat):
    whole = call_format.written.calls([PARIS])
    text = whole[: whole.index("Paris") + len("Paris")]
    plan = ParserPlan(call_format=call_format, calls_are_constrained=True, must_call=True)
    for end in range(len(text)):
        said = reply(plan, text[:end], Finish.LENGTH).gathered
        assert (said.content_text, said.thinking_text, said.calls) == ("", "", []), repr(text[:end])


@EACH
def test_whole_calls_before_one_that_was_cut_stay(call_format: CallFormat):
    written = call_format.written
    if written.separator is None:
        pytest.skip("one call at most")
    first = written.calls([PARIS]).removesuffix(written.closing) + written.separator
    two = written.calls([PARIS, PARIS])
    plan = ParserPlan(call_format=call_format, calls_are_constrained=True, must_call=True)
    for end in range(len(first), two.rindex("Paris")):
        said = reply(plan, two[:end], Finish.LENGTH).gathered
        assert [(call.name, json.loads(call.arguments_text)) for call in said.calls] == [PARIS], repr(two[:end])
        assert said.content_text == ""


@EACH
def test_what_the_limit_leaves_of_the_mark_behind_a_call_is_not_content(call_format: CallFormat):
    written = call_format.written
    texts = [written.calls([PARIS] * n_calls) for n_calls in (1, 2) if n_calls == 1 or written.separator is not None]
    for text, calls_are_constrained in product(texts, (False, True)):
        plan = ParserPlan(call_format=call_format, calls_are_constrained=calls_are_constrained)
        for end in range(text.index("Paris") + len("Paris"), len(text) + 1):
            said = reply(plan, text[:end], Finish.LENGTH).gathered
            assert not said.calls or said.content_text == "", repr(text[:end])


def test_what_follows_a_call_is_content_though_the_limit_cut_it():
    plan = ParserPlan(call_format=formats.HERMES)
    text = f"{formats.HERMES.written.calls([PARIS])}\nIt is a <b"
    said = reply(plan, text, Finish.LENGTH).gathered
    assert (said.content_text, len(said.calls)) == ("It is a <b", 1)
    assert reply(plan, f"{text[:-10]}<", Finish.STOP).gathered.content_text == "<"


@pytest.mark.parametrize("name", BEGUN)
def test_a_call_that_the_model_chose_is_left_out_and_what_it_said_before_is_not(name: str):
    call_format = next(each for each in vars(formats).values() if isinstance(each, CallFormat) and each.name == name)
    plan = ParserPlan(call_format=call_format)
    said = reply(plan, BEGUN[name], Finish.LENGTH).gathered
    assert (said.content_text, said.calls) == ("", [])
    assert reply(plan, BEGUN[name], Finish.STOP).gathered.content_text == BEGUN[name]
    if not call_format.unmarked:
        assert reply(plan, f"Let me look. {BEGUN[name]}", Finish.LENGTH).gathered.content_text == "Let me look."


@pytest.mark.parametrize("text", ['{"id": 7, "text": "It is', "{", "a < b and <tool", "<tool_call> is a mark"])
@pytest.mark.parametrize("call_format", [formats.LLAMA_JSON, formats.HERMES], ids=lambda known: known.name)
def test_an_answer_that_was_cut_is_not_taken_for_a_call(call_format: CallFormat, text: str):
    assert reply(ParserPlan(call_format=call_format), text, Finish.LENGTH).gathered.content_text == text


def test_half_a_program_is_not_run():
    parser = ParserPlan(call_format=formats.LLAMA_JSON).parser({"python": {}})
    assert parser.feed("<|python_tag|>import os; os.remo") == []
    assert parser.finish(is_cut=True) == []


def test_a_stream_keeps_the_arguments_that_were_sent():
    parser = ParserPlan(call_format=formats.HERMES, calls_are_constrained=True, must_call=True).parser(SCHEMAS)
    start, arguments = parser.feed('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa')
    assert isinstance(start, CallStart)
    assert arguments == CallArguments(0, '{"city": "Pa')
    assert parser.finish(is_cut=True) == []


def test_a_call_in_which_the_answer_was_to_stop_is_left_out():
    plan = ParserPlan(call_format=formats.HERMES, calls_are_constrained=True)
    said = reply(plan, 'I look. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa', Finish.STOP)
    assert (said.gathered.content_text, said.gathered.calls, said.n_calls) == ("I look.", [], 0)


def test_a_forced_call_that_is_whole_stays_and_so_does_content_of_a_model_that_stopped():
    plan = ParserPlan(call_format=formats.HERMES, must_call=True)
    text = '<tool_call>\n{"name": "get_time", "arguments": {}}'
    said = reply(plan, text, Finish.LENGTH).gathered
    assert [call.name for call in said.calls] == ["get_time"]
    assert plan.parser(SCHEMAS).feed("Sorry") == [Content("Sorry")]
