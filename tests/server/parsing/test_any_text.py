"""Texts that no model should write: marks in any order, calls half written, everything cut anywhere."""

from __future__ import annotations

import re
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.server.parsing import formats
from localrun.server.parsing.channels import read_glimmer, read_harmony
from localrun.server.parsing.parser import CallFormat, ParserPlan
from localrun.server.parsing.pieces import CallArguments, CallStart, Piece
from tests.depth import DEPTH
from tests.server.parsing.golden import SCHEMAS, THINK
from tests.server.parsing.reading_aloud import read

FORMATS = sorted(
    {value.name: value for value in vars(formats).values() if isinstance(value, CallFormat)}.values(),
    key=lambda known: known.name,
)
EACH = pytest.mark.parametrize("call_format", FORMATS, ids=lambda known: known.name)

_JSON = ("{", "}", "[", "]", '"', ":", ",", "\\", '{"name": "', '"arguments": {', "1", "null", " ", "\n", "(", ")", "=")
_TAGS = (
    "<think>",
    "</think>",
    "</tool_call>",
    "<function=get_time>",
    "</function>",
    "<parameter=city>",
    "</parameter>",
)
_NAMES = ("get_weather", "get_time", "functions.get_time:0", "city", "all\n")
_WORD = re.compile(r"w\d+w")


def fragments(call_format: CallFormat) -> st.SearchStrategy[str]:
    own = [*call_format.marks, *call_format.own_marks, *_JSON, *_TAGS, *_NAMES]
    written = call_format.written
    own += [part for part in (written.lead, written.before, written.after, written.closing) if part]
    return st.lists(st.sampled_from([*own, "#", "#", "#"]), max_size=30).map(_with_words)


def _with_words(parts: list[str]) -> str:
    """The parts joined, every `#` as a word that is like no other."""
    return "".join(f"w{index}w" if part == "#" else part for index, part in enumerate(parts))


def plan(call_format: CallFormat, *, streams: bool = False) -> ParserPlan:
    return ParserPlan(call_format=call_format, tags=THINK, control_tokens=("<|x|>",), calls_are_constrained=streams)


def joined(pieces: list[Piece]) -> list[tuple[str, str]]:
    result: list[tuple[str, str]] = []
    for piece in pieces:
        text = piece.name if isinstance(piece, CallStart) else piece.text
        kind = type(piece).__name__ + (str(piece.index) if isinstance(piece, (CallStart, CallArguments)) else "")
        if result and result[-1][0] == kind:
            result[-1] = (kind, result[-1][1] + text)
        else:
            result.append((kind, text))
    return result


@EACH
@pytest.mark.parametrize("streams", [False, True])
@settings(max_examples=40 * DEPTH)
@given(data=st.data())
def test_how_a_text_is_cut_never_matters(call_format: CallFormat, streams: bool, data: st.DataObject):
    text = data.draw(fragments(call_format))
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    whole = joined(read(plan(call_format, streams=streams).parser(SCHEMAS), [text]))
    assert joined(read(plan(call_format, streams=streams).parser(SCHEMAS), parts)) == whole
    assert joined(read(plan(call_format, streams=streams).parser(SCHEMAS), text)) == whole


@EACH
@settings(max_examples=40 * DEPTH)
@given(data=st.data())
def test_no_word_is_lost_unless_it_stands_in_a_header(call_format: CallFormat, data: st.DataObject):
    text = _each_parameter_once(data.draw(fragments(call_format)))
    said = " ".join(part for _, part in joined(read(plan(call_format).parser(SCHEMAS), [text])))
    expected = text if call_format.whole not in (read_harmony, read_glimmer) else _without_headers(text)
    assert set(_WORD.findall(expected)) <= set(_WORD.findall(said))


def _each_parameter_once(text: str) -> str:
    """Of a parameter that is written twice the last value counts."""
    numbers = count()
    return re.sub("(?<==)city(?=>)", lambda _: f"city{next(numbers)}", text)


def _without_headers(text: str) -> str:
    """gpt-oss and Muse Glimmer: what stands between a mark that begins a header and the next mark, of whatever kind."""
    ends = r"<\|end\|>|<\|call\|>|<\|return\|>|<\|eo[mt]\|>"
    return re.sub(rf"(<\|start\|>|<\|channel\|>|^ to=)(?:(?!{ends}).)*", "", text, flags=re.DOTALL)
