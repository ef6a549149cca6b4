"""What comes when: nothing is held back longer than it must be."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from localrun.server.parsing import formats
from localrun.server.parsing.json_calls import MAX_DEPTH
from localrun.server.parsing.parser import ParserPlan, ThinkingTags
from localrun.server.parsing.pieces import CallArguments, CallStart, Content, Thinking
from localrun.server.parsing.source import MAX_MALFORMED_CALLS, Source
from tests.server.parsing.golden import BRACKETS, COHERE, GEMMA_CHANNEL, SCHEMAS, THINK
from tests.server.parsing.reading_aloud import meaning, read


def test_content_comes_at_once_and_a_beginning_of_a_mark_as_soon_as_it_is_none():
    parser = ParserPlan(call_format=formats.HERMES, tags=THINK).parser(SCHEMAS)
    assert parser.feed("Hello") == [Content("Hello")]
    assert parser.feed(" <") == []
    assert parser.feed("tool") == []
    assert parser.feed("s") == [Content(" <tools")]
    assert parser.feed(" ") == []
    assert parser.feed("x") == [Content(" x")]


def test_thinking_comes_as_it_is_written():
    parser = ParserPlan(call_format=None, tags=THINK).parser({})
    assert parser.feed("<think>\n") == []
    assert parser.feed("Hm") == [Thinking("Hm")]
    assert parser.feed("!</think>\n\nYes") == [Thinking("!"), Content("Yes")]


def test_a_mark_that_begins_a_longer_one_waits_for_that_until_the_end():
    answer_marks = frozenset({"<end>", "<end>of", "<turn>"})
    parser = ParserPlan(call_format=None, answer_marks=answer_marks, control_tokens=tuple(answer_marks)).parser({})
    assert parser.feed("Yes.<end>") == [Content("Yes.")]
    assert parser.finish(is_cut=False) == []


ABOUT_TAGS = (
    "Use re.sub(r'{0}.*?{1}', '', text) to strip it.",
    "The `{1}` tag closes it.",
    "The `{0}` tag opens it, and then there is more.",
    "Two: {1} {1}\t{0}{0} and {1}",
)


@pytest.mark.parametrize("text", ABOUT_TAGS)
@pytest.mark.parametrize("is_control", [False, True])
@pytest.mark.parametrize("before", ["", "Hm.</think>\n", "<think>Hm.</think>\n", "\n"])
@pytest.mark.parametrize("tags", [THINK, BRACKETS, COHERE, GEMMA_CHANNEL], ids=lambda tags: tags.opening)
def test_an_answer_about_the_tags_keeps_them(tags: ThinkingTags, before: str, is_control: bool, text: str):
    controls = (tags.opening, tags.closing) if is_control else ()
    plan = ParserPlan(call_format=formats.HERMES, tags=tags, control_tokens=controls)
    answer = text.format(tags.opening, tags.closing)
    reply = before.replace("<think>", tags.opening).replace("</think>", tags.closing) + answer
    for size in (1, 3, len(reply)):
        parser = plan.parser(SCHEMAS, is_thinking=before.startswith("Hm"))
        pieces = meaning(read(parser, (reply[at : at + size] for at in range(0, len(reply), size))))
        expected = (("thinking", "Hm."), ("content", answer)) if "Hm" in before else (("content", before + answer),)
        assert pieces == expected, f"pieces of {size}"


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<think>Hm.</think><response>Yes.</response>\n", "Yes.\n"),
        ("<response>Use <response>x</response> here.</response>", "Use <response>x</response> here."),
        ("Yes, <response> is a tag.", "Yes, <response> is a tag."),
    ],
)
def test_marks_round_an_answer_are_left_out_round_it_alone(reply: str, answer: str):
    plan = ParserPlan(tags=THINK, answer_marks=frozenset(("<response>", "</response>")))
    for size in (1, 3, len(reply)):
        pieces = meaning(read(plan.parser({}), (reply[at : at + size] for at in range(0, len(reply), size))))
        assert pieces[-1] == ("content", answer)


def test_constrained_arguments_come_while_they_are_written():
    parser = ParserPlan(call_format=formats.HERMES, calls_are_constrained=True).parser(SCHEMAS)
    assert parser.feed('<tool_call>\n{"name": "save", "arguments": ') == []
    start, first = parser.feed('{"text": "a long')
    assert isinstance(start, CallStart)
    assert (start.index, start.name, first) == (0, "save", CallArguments(0, '{"text": "a long'))
    assert parser.feed(" story") == [CallArguments(0, " story")]
    assert parser.feed('"}') == [CallArguments(0, '"}')]
    assert parser.feed("}\n</tool_call>") == []


def test_constrained_arguments_that_are_cut_short_are_left_as_they_are():
    parser = ParserPlan(call_format=formats.HERMES, calls_are_constrained=True).parser(SCHEMAS)
    parser.feed('<tool_call>\n{"name": "save", "arguments": {"text": "rm -r /tmp')
    assert parser.finish() == []


def test_an_unconstrained_call_comes_whole():
    parser = ParserPlan(call_format=formats.HERMES).parser(SCHEMAS)
    assert parser.feed('<tool_call>\n{"name": "save", "arguments": {"text": "a"}') == []
    _, arguments = parser.feed("}")
    assert arguments == CallArguments(0, '{"text": "a"}')


@pytest.mark.parametrize("first", ["<parameter=city>Rome</parameter>", "<parameter=city>Rome"])
def test_of_a_parameter_that_is_written_twice_the_last_value_counts(first: str):
    reply = f"<tool_call><function=get_weather>{first}<parameter=city>Oslo</parameter></function></tool_call>"
    _, arguments = read(ParserPlan(call_format=formats.QWEN_CODER).parser(SCHEMAS), [reply])
    assert arguments == CallArguments(0, '{"city": "Oslo"}')


@pytest.mark.parametrize("call_format", [formats.LLAMA_JSON, formats.PYTHONIC], ids=lambda known: known.name)
def test_an_answer_that_only_begins_like_a_call_is_not_held_back(call_format: formats.CallFormat):
    parser = ParserPlan(call_format=call_format).parser(SCHEMAS)
    assert parser.feed("{") in ([], [Content("{")])
    assert parser.feed('"answer": ') in ([Content('{"answer":')], [Content('"answer":')])


def test_every_call_of_a_reply_has_an_id_of_its_own():
    parser = ParserPlan(call_format=formats.MISTRAL_NAMED).parser(SCHEMAS)
    pieces = parser.feed("[TOOL_CALLS]get_time[ARGS]{}[TOOL_CALLS]get_time[ARGS]{}") + parser.finish()
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    assert [start.index for start in starts] == [0, 1]
    assert len({start.id for start in starts}) == 2


@pytest.mark.parametrize(("n_malformed", "n_calls"), [(MAX_MALFORMED_CALLS - 1, 1), (MAX_MALFORMED_CALLS, 0)])
def test_whoever_opens_many_calls_and_writes_none_is_no_longer_waited_for(n_malformed: int, n_calls: int):
    parser = ParserPlan(call_format=formats.HERMES).parser(SCHEMAS)
    pieces = read(parser, ["<tool_call>no " * n_malformed, '<tool_call>{"name": "get_time", "arguments": {}}'])
    assert sum(isinstance(piece, CallStart) for piece in pieces) == n_calls


def count(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """What a reader does with its source, while it does it."""
    done: list[str] = []

    def counted(name: str, method: Any) -> Any:
        def do(*arguments: Any, **more: Any) -> Any:
            done.append(name)
            return method(*arguments, **more)

        return do

    for name in names:
        monkeypatch.setattr(Source, name, counted(name, getattr(Source, name)))
    return done


@pytest.mark.parametrize("n_tools", [1, 40])
def test_an_end_that_never_comes_is_looked_for_once(monkeypatch: pytest.MonkeyPatch, n_tools: int):
    looked = count(monkeypatch, "until")
    schemas = {f"save{at}": {"properties": {f"text{at}": {}}} for at in range(n_tools)}
    text = "".join(f"<tool_call><function=save{at % n_tools}><parameter=text>a</parameter>b " for at in range(400))
    pieces = read(ParserPlan(call_format=formats.QWEN_CODER).parser(schemas), [text])
    assert pieces == [Content(text)]
    assert len(looked) < 4 * 400


def test_many_parameters_cost_no_more_than_one(monkeypatch: pytest.MonkeyPatch):
    text = "<tool_call><function=save><parameter=p0>" + "a <parameter=b" * 100
    done = count(monkeypatch, "take", "until")
    steps = []
    for n in (1, 1000):
        schemas = {"save": {"properties": {f"p{at}": {} for at in range(n)}}}
        read(ParserPlan(call_format=formats.QWEN_CODER).parser(schemas), [text])
        steps.append(len(done))
        done.clear()
    assert steps[0] == steps[1]


@pytest.mark.parametrize("properties", [5, True, None, "odd", ["text"]])
def test_properties_that_are_none_are_no_names(properties: Any):
    """Where no decoding is held to a schema, nobody has looked whether it is one."""
    text = "<tool_call><function=save><parameter=text>a <parameter=text>b</parameter></function></tool_call>"
    parser = ParserPlan(call_format=formats.QWEN_CODER).parser({"save": {"properties": properties}})
    assert meaning(read(parser, [text])) == (("call", ("save", {"text": "a <parameter=text>b"})),)


def test_a_held_text_is_not_copied_while_white_space_is_waited_for():
    source = Source()
    source.put("</parameter> " * 1000 + "\n")
    source.at = len(source.text) - 1
    n_before = sys.getrefcount(source.text)
    reading = source.skip_space()
    next(reading)
    n_after = sys.getrefcount(source.text)
    assert n_after == n_before


@pytest.mark.parametrize(("depth", "n_calls"), [(MAX_DEPTH, 1), (MAX_DEPTH + 1, 0)])
def test_arguments_nest_so_deep_and_no_deeper(depth: int, n_calls: int):
    lists = "[" * (depth - 2) + "]" * (depth - 2)
    text = f'<tool_call>{{"name": "save", "arguments": {{"tags": {lists}}}}}</tool_call>'
    pieces = read(ParserPlan(call_format=formats.HERMES).parser(SCHEMAS), [text])
    assert sum(isinstance(piece, CallStart) for piece in pieces) == n_calls


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        "<tool_call><function=a><parameter=b>" * 5_000,
        '<tool_call>{"name": "a' * 10_000,
        "[TOOL_CALLS]" * 20_000,
        "[" * 100_000,
        '{"' * 50_000,
        " " * 200_000,
    ],
    ids=lambda text: text[:20],
)
@pytest.mark.parametrize(
    "call_format",
    [formats.HERMES, formats.QWEN_CODER, formats.MISTRAL_NAMED, formats.PYTHONIC],
    ids=lambda known: known.name,
)
def test_nonsense_comes_back_whole(call_format: formats.CallFormat, text: str):
    parser = ParserPlan(call_format=call_format, tags=THINK).parser(SCHEMAS)
    pieces = [piece for at in range(0, len(text), 1000) for piece in parser.feed(text[at : at + 1000])]
    pieces += parser.finish()
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == text
