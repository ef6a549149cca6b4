"""Every format, in pieces of every size: the same thinking, content and calls."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.server.parsing import formats
from localrun.server.parsing.parser import ParserPlan
from tests.depth import DEPTH
from tests.server.parsing.golden import GOLDEN, SCHEMAS, THINK, Golden
from tests.server.parsing.reading_aloud import meaning, parser_of, read

CASES = pytest.mark.parametrize(
    "case", GOLDEN, ids=lambda case: f"{case.format.name if case.format else '-'}: {case.name}"
)


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@CASES
def test_a_reply_means_the_same_in_pieces_of_every_size(case: Golden):
    for size in (len(case.text), *range(1, 12), 17, 40):
        assert meaning(read(parser_of(case), cut(case.text, size))) == case.expects, f"pieces of {size}"


@CASES
@settings(max_examples=8 * DEPTH)
@given(data=st.data())
def test_a_reply_means_the_same_cut_anywhere(case: Golden, data: st.DataObject):
    places = data.draw(st.lists(st.integers(0, len(case.text)), max_size=8))
    bounds = [0, *sorted(places), len(case.text)]
    parts = [case.text[start:end] for start, end in pairwise(bounds)]
    assert meaning(read(parser_of(case), parts)) == case.expects


@pytest.mark.parametrize("is_control", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in GOLDEN
        if case.format and case.text.startswith(tuple(case.format.marks)) and case.expects and not case.tags
        if all(kind == "call" and value[0] in SCHEMAS for kind, value in case.expects)
    ],
    ids=lambda case: f"{case.format.name}: {case.name}",
)
def test_calls_before_the_end_of_the_thinking_end_it(case: Golden, is_control: bool):
    assert case.format is not None
    controls = tuple(case.format.marks) if is_control else ()
    plan = ParserPlan(call_format=case.format, tags=THINK, control_tokens=controls)
    for size in (len(case.text), 1, 3, 7):
        read_so = read(plan.parser(SCHEMAS, is_thinking=True), cut(f"I need it.\n{case.text}", size))
        assert meaning(read_so) == (("thinking", "I need it."), *case.expects), f"pieces of {size}"


# What no grammar lets a model write.
_BROKEN = ("broken", "short", "back", "evaluated", "nothing to call", "line break", "not closed", "not opened")


@pytest.mark.parametrize(
    "case",
    [case for case in GOLDEN if case.format and not any(word in case.name for word in _BROKEN)],
    ids=lambda case: f"{case.format.name}: {case.name}",
)
def test_constrained_calls_stream_to_the_same_meaning(case: Golden):
    for size in (len(case.text), 1, 3, 7):
        assert meaning(read(parser_of(case, streams=True), cut(case.text, size))) == case.expects, f"pieces of {size}"


def test_the_table_has_every_format():
    known = {name for name, value in vars(formats).items() if isinstance(value, formats.CallFormat)}
    shown = {case.format.name for case in GOLDEN if case.format}
    assert {getattr(formats, name).name for name in known} == shown
