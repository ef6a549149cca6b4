"""The grammars of tool calls and of texts that clients write."""

from __future__ import annotations

import pytest

from localrun.engine.sample.grammar_library import GrammarVocabulary
from localrun.errors import BadRequest
from localrun.server.structured import CallShape, calls, gbnf
from localrun.wire import Grammar, GrammarKind
from tests.engine.sample.compiling import compile_grammar
from tests.fakes.backend import FakeBackend
from tests.fakes.tokens import CONTROL

BACKEND = FakeBackend(n_cells=8, n_seqs=1, n_batch=8)
VOCABULARY = GrammarVocabulary(BACKEND)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DAYS = {"type": "object", "properties": {"days": {"type": "integer"}}}
SHAPES = [
    CallShape('<call>{"name": "weather", "arguments": ', CITY, "}</call>"),
    CallShape('<call>{"name": "wait", "arguments": ', DAYS, "}</call>"),
]
WEATHER = '<call>{"name": "weather", "arguments": {"city": "Rome"}}</call>'
WAIT = '<call>{"name": "wait", "arguments": {"days": 3}}</call>'


def is_match(grammar: Grammar, text: str) -> bool:
    """Whether the whole text is an answer."""
    matcher = compile_grammar(grammar, VOCABULARY).matcher
    tokens = BACKEND.tokenize(text, parse_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize(("is_one", "counts"), [(True, {1}), (False, {1, 2, 3})])
def test_so_many_calls_as_asked_for(is_one: bool, counts: set[int]):
    grammar = calls(SHAPES, is_one=is_one, separator="\n", before="[", after="]")
    for count in range(4):
        text = "[" + "\n".join([WEATHER, WAIT, WEATHER][:count]) + "]"
        assert is_match(grammar, text) == (count in counts)


def test_arguments_are_those_of_the_tool_that_is_called():
    grammar = calls(SHAPES, is_one=True)
    assert is_match(grammar, WAIT)
    assert not is_match(grammar, WAIT.replace("days", "city"))
    assert not is_match(grammar, WEATHER.replace('"Rome"', "3"))
    assert not is_match(grammar, WEATHER.replace("weather", "whether"))


def test_two_tools_may_take_the_same_arguments_and_share_their_beginning():
    shapes = [CallShape("f(", CITY, ")"), CallShape("f2(", CITY, ")"), CallShape("f2(", DAYS, ")!")]
    grammar = calls(shapes, is_one=False)
    assert is_match(grammar, 'f({"city": "a"})f2({"city": "b"})f2({"days": 1})!')


def test_control_tokens_are_meant_in_literals_and_not_in_arguments():
    grammar = calls([CallShape("<|im_start|>", CITY, "<|im_end|>")], is_one=True)
    matcher = compile_grammar(grammar, VOCABULARY).matcher
    assert matcher.validate_tokens([CONTROL["<|im_start|>"]]) == 1
    assert matcher.validate_tokens([ord("<")]) == 0
    matcher.consume_tokens([CONTROL["<|im_start|>"], *b'{"city": "'])
    assert matcher.validate_tokens([CONTROL["<|im_end|>"]]) == 0
    assert matcher.validate_tokens(list(b"<|im_end|>")) == len("<|im_end|>")


def test_literals_may_hold_anything():
    odd = 'a"b\\c\n%json {} literal_0: "x" äß🦊\t'
    grammar = calls([CallShape(odd, {"type": "integer"}, odd)], is_one=True, before=odd, after=odd)
    assert is_match(grammar, f"{odd}{odd}7{odd}{odd}")


def test_triggers_go_along():
    assert calls(SHAPES, is_one=True, triggers=["<call>"]).triggers == ("<call>",)


def test_a_schema_is_refused_by_where_it_came_from():
    shape = CallShape(
        "", {"type": "object", "properties": {"a": {"minLenght": 1}}}, "", field="tools[1].function.parameters"
    )
    with pytest.raises(BadRequest, match=r"tools\[1\].function.parameters.properties.a: .*'minLenght'") as caught:
        calls([shape], is_one=True)
    assert caught.value.field == "tools[1].function.parameters"


def test_written_grammars_are_taken_as_they_are_unless_empty_or_huge():
    assert gbnf('root ::= "a"') == Grammar(GrammarKind.GBNF, 'root ::= "a"')
    with pytest.raises(BadRequest, match="grammar is empty"):
        gbnf(" \n")
    with pytest.raises(BadRequest, match=r"grammar.*300000.*262144"):
        gbnf("x" * 300_000)


def test_tools_that_make_too_much_of_a_grammar_are_refused_before_all_are_looked_at():
    large = {"type": "object", "properties": {"a": {"enum": ["x" * 1000] * 100}}}
    looked_at = []

    class Counted(dict[str, object]):
        def items(self) -> object:
            looked_at.append(1)
            return super().items()

    with pytest.raises(BadRequest, match="262144 bytes"):
        calls([CallShape("f(", Counted(large), ")")] * 1000, is_one=True)
    assert len(looked_at) < 10
