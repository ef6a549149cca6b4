"""Grammars of calls, compiled: they take what each format's models write, and nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from localrun.engine.sample import grammar_library, grammar_worker
from localrun.engine.sample.grammar_library import source_of
from localrun.errors import BadRequest
from localrun.server import notices, structured
from localrun.server.parsing import formats
from localrun.server.parsing.parser import CallFormat, ParserPlan
from localrun.server.parsing.written import Written, loose_reader
from localrun.server.prompting import constraint
from localrun.server.prompting.ask import Tool
from localrun.server.structured import MAX_GRAMMAR_BYTES
from localrun.wire import Grammar, GrammarKind
from tests.says import says
from tests.server.parsing.golden import SCHEMAS, THINK, Call
from tests.server.parsing.reading_aloud import meaning, read

TOOLS = (Tool("get_weather", "", SCHEMAS["get_weather"]), Tool("get_time", "", SCHEMAS["get_time"]))
WRITTEN = sorted(
    {value.name: value for value in vars(formats).values() if isinstance(value, CallFormat)}.values(),
    key=lambda known: known.name,
)
EACH = pytest.mark.parametrize("call_format", WRITTEN, ids=lambda known: known.name)
PARIS: Call = ("get_weather", {"city": "Paris", "days": 2})
TIME: Call = ("get_time", {})
_tokenizer = LLTokenizer("byte")


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(_tokenizer, source_of(grammar, lambda literal: [(literal, -1)]))
    assert not matcher.is_error(), matcher.get_error()
    tokens = _tokenizer.tokenize_str(text)
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return bool(matcher.is_accepting())


def may_begin(grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(_tokenizer, source_of(grammar, lambda literal: [(literal, -1)]))
    return bool(matcher.validate_tokens(tokens := _tokenizer.tokenize_str(text)) == len(tokens))


def spelled(written: Written, *calls: Call, begins_at: str = "") -> str:
    return written.calls(calls).removeprefix(begins_at)


@EACH
def test_forced_calls_are_what_the_parser_reads(call_format: CallFormat):
    written = call_format.written
    text = spelled(written, PARIS)
    grammar = constraint.forced_calls(written, TOOLS, is_one=False)
    assert accepts(grammar, text)
    assert not accepts(grammar, "Hello.")
    assert not accepts(grammar, spelled(written, ("get_moon", {})))
    plan = ParserPlan(call_format=call_format, calls_are_constrained=True)
    expected: tuple[tuple[str, Any], ...] = (("call", ("get_weather", {"city": "Paris", "days": 2})),)
    assert meaning(read(plan.parser(SCHEMAS), text)) == expected


BARE = [each for each in WRITTEN if each.written.arguments is not None and each.written.arguments.quote == ""]


@pytest.mark.parametrize("inside", ["END", "END b", "END\nEND b", "</tool_call> and CALLEND b", "x\n\nEND"])
@pytest.mark.parametrize("call_format", BARE, ids=lambda known: known.name)
def test_a_text_may_be_about_calls(call_format: CallFormat, inside: str):
    written = call_format.written
    assert written.arguments is not None
    end = written.arguments.after.strip()
    text = f"a {inside}".replace("CALLEND", written.after.split()[0]).replace("END", end)
    call: Call = ("get_weather", {"city": text, "days": 2})
    reply = spelled(written, call, ("get_weather", {"city": "Rome"}))
    if written.separator is not None:
        assert accepts(constraint.forced_calls(written, TOOLS, is_one=False), reply)
        if (lazy := constraint.lazy_calls(written, TOOLS, is_one=False)) is not None:
            assert accepts(lazy, reply.removeprefix(written.opening))
    expected = (("call", call), ("call", ("get_weather", {"city": "Rome"})))
    for is_constrained in (True, False):
        plan = ParserPlan(call_format=call_format, calls_are_constrained=is_constrained)
        for size in (1, len(reply)):
            parts = (reply[at : at + size] for at in range(0, len(reply), size))
            assert meaning(read(plan.parser(SCHEMAS), parts)) == expected


@pytest.mark.parametrize("gap", ["", " ", "\n\n"])
@pytest.mark.parametrize("call_format", BARE, ids=lambda known: known.name)
def test_behind_a_text_other_white_space_ends_it_as_well(call_format: CallFormat, gap: str):
    """Else the text would go on for the grammar alone, and a model that is done could not end."""
    written = call_format.written
    assert written.arguments is not None
    end = written.arguments.after.strip()
    text = re.sub(rf"{re.escape(end)}\s*", end + gap, spelled(written, ("get_weather", {"city": "Paris"})))
    assert accepts(constraint.forced_calls(written, TOOLS, is_one=False), text)


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("call_format", BARE, ids=lambda known: known.name)
def test_whoever_leaves_out_what_must_come_is_held_to_it_at_once(call_format: CallFormat, is_lazy: bool):
    """And not to a text that goes on, which a model that takes it to be over would never leave."""
    written = call_format.written
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]}
    make = constraint.lazy_calls if is_lazy else constraint.forced_calls
    if (grammar := make(written, (Tool("put", "", {"type": "object", **schema}),), is_one=True)) is None:
        return
    whole = spelled(written, ("put", {"a": "x", "b": "y"})).removeprefix(written.opening if is_lazy else "")
    early = spelled(written, ("put", {"a": "x"})).removeprefix(written.opening if is_lazy else "")
    n_same = next(at for at, (one, other) in enumerate(zip(whole, early, strict=False)) if one != other)
    assert accepts(grammar, whole)
    assert not may_begin(grammar, early[: n_same + 1])


@pytest.mark.parametrize("call_format", [each for each in BARE if each.written.closing], ids=lambda known: known.name)
def test_where_the_end_of_a_call_is_forgotten_what_ends_all_calls_ends_its_text(call_format: CallFormat):
    written = call_format.written
    grammar = constraint.forced_calls(written, TOOLS, is_one=False)
    call: Call = ("get_weather", {"city": "a </x> b"})
    begun, end, _ = spelled(written, call).rpartition(written.after)
    assert end
    text = begun + written.closing
    assert accepts(grammar, text)
    assert not accepts(grammar, f"{text} b")
    loose = CallFormat("loose", written, {written.opening: loose_reader(written, call_id="\0")})
    for reader, is_constrained in ((call_format, True), (call_format, False), (loose, True)):
        plan = ParserPlan(call_format=reader, calls_are_constrained=is_constrained)
        for size in (1, len(text)):
            parts = (text[at : at + size] for at in range(0, len(text), size))
            assert meaning(read(plan.parser(SCHEMAS), parts)) == (("call", call),)


@EACH
def test_several_calls_unless_there_may_be_but_one(call_format: CallFormat):
    written = call_format.written
    text = spelled(written, PARIS, TIME)
    assert accepts(constraint.forced_calls(written, TOOLS, is_one=False), text) == (written.separator is not None)
    assert not accepts(constraint.forced_calls(written, TOOLS, is_one=True), text)


@EACH
def test_a_lazy_grammar_begins_behind_the_opening(call_format: CallFormat):
    written = call_format.written
    grammar = constraint.lazy_calls(written, TOOLS, is_one=False)
    if grammar is None:
        assert not written.triggers
    else:
        assert grammar.triggers[0] == written.opening
        assert accepts(grammar, spelled(written, PARIS, begins_at=written.opening))


@EACH
def test_thinking_may_come_before_forced_calls(call_format: CallFormat):
    written = call_format.written
    if call_format.thoughts:
        pytest.skip("thinking has a header of its own")
    forced = constraint.forced_calls(written, TOOLS, is_one=True)
    grammar = constraint.after_thinking(forced, THINK, is_open=False, may_think=True)
    text = spelled(written, PARIS)
    assert accepts(grammar, text)
    assert accepts(grammar, f"<think>\na < b </thin {{x}}\n</think>\n\n{text}")
    assert not accepts(grammar, "<think>a</think>Hello.")


@EACH
def test_a_reply_that_must_call_cannot_end_inside_of_thinking_that_the_prompt_opened(call_format: CallFormat):
    if call_format.thoughts:
        pytest.skip("thinking has a header of its own")
    forced = constraint.forced_calls(call_format.written, TOOLS, is_one=True)
    grammar = constraint.after_thinking(forced, THINK, is_open=True, may_think=True, must_come=True)
    text = spelled(call_format.written, PARIS)
    assert grammar.triggers == ()
    assert accepts(grammar, f"Hm.\n</think>\n\n{text}")
    assert not accepts(grammar, "Hm.\n")
    assert not accepts(grammar, "Hm.</think>")
    assert not accepts(grammar, "Hm.</think>Hello.")


@EACH
def test_calls_or_an_answer_of_a_schema(call_format: CallFormat):
    written = call_format.written
    answer = structured.json_schema(
        {
            "type": "object",
            "properties": {"n": {"$ref": "#/$defs/n"}},
            "required": ["n"],
            "$defs": {"n": {"type": "integer"}},
        },
        field="response_format",
    )
    grammar = constraint.calls_or_answer(written, TOOLS, answer, is_one=False)
    assert accepts(grammar, '{"n": 1}')
    assert accepts(grammar, spelled(written, PARIS))
    assert not accepts(grammar, '{"n": "x"}')


REPORT = Tool(
    "report",
    "",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "kind": {"enum": ["bug", "wish"]},
            "n": {"type": "integer", "minimum": 1},
            "at": {"$ref": "#/$defs/at"},
            "more": {"type": ["array", "null"], "items": {"type": "number"}},
        },
        "required": ["text", "n"],
        "$defs": {"at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    },
)
TEXT = "if a < b:\n    print('</p>, \\\\n') # \u00e9"


@EACH
@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        ({"text": TEXT, "n": 2}, True),
        ({"text": "", "kind": "bug", "n": 1, "at": {"x": 1.5}, "more": [1, 2.5]}, True),
        ({"text": "a", "kind": "wish", "n": 30, "more": None}, True),
        ({"text": "a"}, False),
        ({"n": 2}, False),
        ({"text": "a", "n": 0}, False),
        ({"text": "a", "n": "2"}, False),
        ({"text": "a", "kind": "praise", "n": 2}, False),
        ({"text": "a", "n": 2, "at": {"y": 1}}, False),
        ({"text": "a", "n": 2, "more": ["b"]}, False),
        ({"text": "a", "n": 2, "other": 1}, False),
    ],
)
def test_forced_arguments_match_the_schema_in_every_format(
    call_format: CallFormat, arguments: dict[str, Any], holds: bool
):
    written = call_format.written
    text = spelled(written, ("report", arguments))
    if written.arguments is not None and arguments.get("n") == "2":
        text = text.replace("2", "two")  # a bare 2 is a number
    assert accepts(constraint.forced_calls(written, [REPORT], is_one=True), text) == holds, text
    if holds:
        plan = ParserPlan(call_format=call_format, calls_are_constrained=True)
        assert meaning(read(plan.parser({"report": REPORT.parameters}), text)) == (("call", ("report", arguments)),)


IN_TAGS = (formats.QWEN_CODER, formats.SEED, formats.MINIMAX, formats.DEEPSEEK_TAGS, formats.DEEPSEEK_V4)


@pytest.mark.parametrize("call_format", [formats.HERMES, *IN_TAGS], ids=lambda known: known.name)
def test_a_call_that_the_model_has_opened_matches_its_schema(call_format: CallFormat):
    """In tags as in JSON; nothing but another call may follow."""
    written = call_format.written
    grammar = constraint.lazy_calls(written, [REPORT], is_one=False)
    assert grammar is not None
    assert grammar.triggers == (written.opening,)
    report: Call = ("report", {"text": TEXT, "kind": "bug", "n": 2, "at": {"x": 1.5}})
    assert accepts(grammar, spelled(written, report, begins_at=written.opening))
    assert accepts(grammar, spelled(written, report, report, begins_at=written.opening))
    assert not accepts(grammar, spelled(written, report, begins_at=written.opening) + "Done.")
    for wrong in ({"text": "a"}, {"text": "a", "n": 0}, {"text": "a", "kind": "praise", "n": 2}):
        assert not accepts(grammar, spelled(written, ("report", wrong), begins_at=written.opening))
    assert not accepts(grammar, spelled(written, ("other", {}), begins_at=written.opening))


@EACH
def test_arguments_that_no_schema_lists(call_format: CallFormat):
    written = call_format.written
    anything = Tool("note", "", {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}})
    nothing = Tool("note", "", {"type": "object", "properties": {}, "additionalProperties": False})
    for arguments in ({}, {"a": 1}, {"a": 1, "b": 22}):
        text = spelled(written, ("note", arguments))
        assert accepts(constraint.forced_calls(written, [anything], is_one=True), text), text
        assert accepts(constraint.forced_calls(written, [nothing], is_one=True), text) == (not arguments), text


@EACH
def test_arguments_of_schemas_that_are_put_together(call_format: CallFormat):
    """Properties stand elsewhere, and one is required without a schema."""
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}
    parameters = {
        "type": "object",
        "allOf": [{"$ref": "#/$defs/named"}, {"properties": {"tree": {"$ref": "#/$defs/tree"}}}],
        "required": ["free"],
        "$defs": {
            "named": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            "tree": tree,
        },
    }
    grammar = constraint.forced_calls(call_format.written, [Tool("note", "", parameters)], is_one=True)
    arguments = {"name": "a", "tree": {"next": {"next": {}}}, "free": "x"}
    assert accepts(grammar, spelled(call_format.written, ("note", arguments)))
    if call_format.written.arguments is not None:
        assert not accepts(
            grammar, spelled(call_format.written, ("note", {"name": "a", "tree": {"next": 1}, "free": ""}))
        )
        assert not accepts(grammar, spelled(call_format.written, ("note", {"name": "a"})))


CONTROLS = (
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "｜DSML｜",
    "</arg_value>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
)


@EACH
def test_texts_end_at_a_mark_that_is_a_control_token(call_format: CallFormat):
    written = call_format.written
    grammar = constraint.forced_calls(written, TOOLS, is_one=True, control_tokens=CONTROLS)
    checked = grammar_worker.checked(grammar, CONTROLS).grammar
    assert checked is not None
    names = {name: 256 + at for at, name in enumerate(CONTROLS)}
    matcher = grammar_library.compile_grammar(checked, grammar_worker._vocabulary(CONTROLS)).matcher
    parts = re.split(f"({'|'.join(map(re.escape, CONTROLS))})", spelled(written, PARIS))
    tokens = [token for part in parts for token in ([names[part]] if part in names else part.encode())]
    assert matcher.try_consume_tokens(tokens) == len(tokens), call_format.name
    assert matcher.is_accepting()


def test_what_a_bare_text_is_not_held_to_is_said():
    code = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[A-Z]{3}$"}}, "required": ["code"]}
    tool = Tool("look_up", "", code, field="tools[0].function.parameters")
    with notices.collected() as noted:
        bare = constraint.forced_calls(formats.QWEN_CODER.written, [tool], is_one=True)
    assert says(noted, "tools[0].function.parameters.properties.code.pattern")
    assert accepts(bare, spelled(formats.QWEN_CODER.written, ("look_up", {"code": "abc"})))
    with notices.collected() as noted:
        quoted = constraint.forced_calls(formats.LFM2.written, [tool], is_one=True)
    assert noted == []
    assert not accepts(quoted, spelled(formats.LFM2.written, ("look_up", {"code": "abc"})))


def test_only_a_schema_can_be_combined_with_tools():
    written = formats.HERMES.written
    with pytest.raises(BadRequest, match="JSON schema"):
        constraint.calls_or_answer(written, TOOLS, Grammar(GrammarKind.REGEX, "a+"), is_one=False)


def test_thinking_that_the_prompt_opened_ends_with_its_closing_tag():
    grammar = constraint.after_thinking(structured.json_object(), THINK, is_open=True, may_think=True)
    assert grammar.triggers == ("</think>",)
    assert constraint.after_thinking(structured.json_object(), THINK, is_open=False, may_think=False).triggers == ()


def test_too_many_tools_for_one_grammar_are_called_with_any_object_and_refused_where_a_call_is_forced():
    written = formats.HERMES.written
    schema = {"type": "object", "properties": {"kind": {"enum": ["x" * 1000] * 50}}}
    tools = [Tool(f"tool_{number}", "", schema) for number in range(100)]
    lazy = constraint.lazy_calls(written, tools, is_one=False)
    assert lazy is not None
    assert len(lazy.text) < MAX_GRAMMAR_BYTES
    assert "xxx" not in lazy.text
    with pytest.raises(BadRequest, match="send fewer tools") as caught:
        constraint.forced_calls(written, tools, is_one=False)
    assert caught.value.field == "tools"
    many = [Tool(f"{number}_" + "n" * 120, "", {}) for number in range(3000)]
    assert constraint.lazy_calls(written, many, is_one=False) is None


@pytest.mark.parametrize(
    "kind",
    [
        {"type": "string", "pattern": "^(?!a)"},
        {"type": "string", "pattern": r"^(a)\1$"},
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 5}]},
    ],
)
def test_a_schema_that_the_engine_would_refuse_does_not_keep_a_tool_from_being_offered(kind: dict[str, Any]):
    written = formats.HERMES.written
    grammar = constraint.lazy_calls(written, [Tool("look", "", {"properties": {"kind": kind}})], is_one=False)
    assert grammar is not None
    assert accepts(grammar, spelled(written, ("look", {"kind": "aa"})).removeprefix(written.triggers[0]))


def test_arguments_in_tags_may_come_in_any_order():
    """Of a call that the model need not make: what it has passed over it could not write any more."""
    written = formats.QWEN_CODER.written
    schema = {"type": "object", "properties": {key: {"type": "integer"} for key in "abcd"}, "required": ["b", "d"]}
    grammar = constraint.lazy_calls(written, [Tool("f", "", schema)], is_one=False)
    assert grammar is not None

    def is_taken(names: str) -> bool:
        return accepts(grammar, spelled(written, ("f", dict.fromkeys(names, 1)), begins_at=written.opening))

    assert all(map(is_taken, ("abcd", "bd", "cbad", "bcda", "bda")))
    assert not any(map(is_taken, ("b", "ac", "acd", "")))


def test_arguments_are_an_object_whatever_else_the_schema_allows():
    written = formats.HERMES.written
    text = Tool("look", "", {"type": "string"}, field="tools[0].function.parameters")
    with pytest.raises(BadRequest, match=r"tools\[0\].function.parameters.type: must be object"):
        constraint.forced_calls(written, [text], is_one=False)
    lazy = constraint.lazy_calls(written, [text], is_one=False)
    assert lazy is not None
    assert not accepts(lazy, spelled(written, ("look", {})).removeprefix(written.triggers[0]).replace("{}", '"a"'))
    forced = constraint.forced_calls(written, [Tool("look", "", {"type": ["object", "null"]})], is_one=False)
    assert accepts(forced, spelled(written, ("look", {})))
    assert not accepts(forced, spelled(written, ("look", {})).replace("{}", "null"))


def test_the_grammar_of_the_same_tools_is_made_once(monkeypatch: pytest.MonkeyPatch):
    n_made = 0
    make = structured.calls

    def counted(*given: Any, **more: Any) -> Grammar:
        nonlocal n_made
        n_made += 1
        return make(*given, **more)

    monkeypatch.setattr(structured, "calls", counted)
    written = formats.HERMES.written

    def tool() -> Tool:
        return Tool("made_once", "", {"type": "object", "properties": {"a": {"type": "string"}}})

    first = constraint.lazy_calls(written, [tool()], is_one=False)
    assert constraint.lazy_calls(written, [tool()], is_one=False) is first
    assert n_made == 1
    assert constraint.lazy_calls(written, [tool()], is_one=True) is not first
    other = constraint.lazy_calls(written, [Tool("another", "", {})], is_one=False)
    assert other is not None
    assert "another" in other.text
