"""Marks round control tokens in clients' text: found everywhere, never forged, never left behind."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.errors import BadRequest
from localrun.server.templates.marks import literal_tree, longest_of, mark, split
from localrun.wire import Segment

TOKENS = ("<|im_start|>", "<|im_end|>", "</s>", "<s>", "<s>special")


def _content(text: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}]}


def _marked_content(text: str) -> tuple[str, object]:
    variables, marks = mark("", _content(text), TOKENS)
    return variables["messages"][0]["content"], marks


def test_text_without_control_tokens_is_not_touched():
    variables = _content("hello <im_end> \ue000")
    marked, marks = mark("template", variables, TOKENS)
    assert marked is variables
    assert marks is None
    assert split("whole \ue000 text", None) == (Segment("whole \ue000 text"),)


def test_a_typed_control_token_becomes_an_untrusted_segment():
    text, marks = _marked_content("a<|im_end|>b")
    assert split(f"<|im_start|>{text}<|im_end|>", marks) == (
        Segment("<|im_start|>a"),
        Segment("<|im_end|>", trusted=False),
        Segment("b<|im_end|>"),
    )


def test_the_longest_control_token_is_taken():
    text, marks = _marked_content("<s>special <s>speci")
    assert [segment.text for segment in split(text, marks) if not segment.trusted] == ["<s>special", "<s>"]


def test_nested_values_and_keys_are_searched():
    call = {"function": {"name": "f", "arguments": {"k<s>": ["x", {"y": "</s>"}]}}}
    variables = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [{"d": "<s>"}]}
    marked, marks = mark("", variables, TOKENS)
    rendered = json.dumps(marked, ensure_ascii=False)
    untrusted = [segment.text for segment in split(rendered, marks) if not segment.trusted]
    assert sorted(untrusted) == ["</s>", "<s>", "<s>"]
    assert "".join(segment.text for segment in split(rendered, marks)) == json.dumps(variables, ensure_ascii=False)


def test_the_models_own_tokens_stay_trusted():
    marked, marks = mark("", {"bos_token": "<s>", "messages": [{"content": "</s>"}]}, TOKENS)
    assert marked["bos_token"] == "<s>"
    assert marks is not None


def test_a_fresh_pair_is_drawn_for_each_render():
    pairs = {(marks.opening, marks.closing) for marks in (_marked_content("<s>")[1] for _ in range(20))}
    assert len(pairs) > 1


def test_private_use_characters_in_the_text_are_never_the_marks():
    taken = "".join(chr(code) for code in range(0xE000, 0xF8FE))
    _, marks = mark(taken[:3000], {"messages": [{"content": "<s>" + taken[3000:]}]}, TOKENS)
    assert {marks.opening, marks.closing} == {"\uf8fe", "\uf8ff"}


def test_escaped_private_use_text_is_kept():
    escapes = "".join(f"\\u{code:04X}" for code in range(0xE000, 0xF8FE))
    text, marks = _marked_content("<s>" + escapes)
    assert "".join(segment.text for segment in split(text, marks)) == "<s>" + escapes


def test_text_that_uses_every_private_use_character_is_refused():
    with pytest.raises(BadRequest, match="private-use"):
        mark("", _content("<s>" + "".join(chr(code) for code in range(0xE000, 0xF900))), TOKENS)


@pytest.mark.parametrize("transform", [lambda text: text[1:], lambda text: text[:-1]], ids=["front", "back"])
def test_a_token_whose_mark_was_cut_off_stays_untrusted(transform):
    text, marks = _marked_content("<|im_end|>")
    segments = split("<|im_start|>" + transform(text) + "<|im_end|>", marks)
    assert segments == (Segment("<|im_start|>"), Segment("<|im_end|>", trusted=False), Segment("<|im_end|>"))


def test_splitting_at_a_typed_token_does_not_distrust_the_template():
    text, marks = _marked_content("thoughts</s>answer")
    assert split("<|im_start|>" + text.split("</s>")[-1], marks) == (Segment("<|im_start|>answer"),)


@pytest.mark.parametrize("transform", ["json", "url", "reverse", "drop"])
def test_transformed_marks_never_stay(transform):
    from urllib.parse import quote

    text, marks = _marked_content("a <s> b")
    output = {"json": json.dumps(text), "url": quote(text), "reverse": text[::-1], "drop": ""}[transform]
    expected = {"json": '"a <s> b"', "url": quote("a <s> b"), "reverse": "b >s< a", "drop": ""}[transform]
    assert "".join(segment.text for segment in split(output, marks)) == expected


@given(st.lists(st.sampled_from([*TOKENS, "<", "s>", "|im_end|>", "\ue000", "\uf8ff", "\\ue000", "x", "\n"])))
def test_any_mixture_comes_back_whole_with_every_token_untrusted(parts):
    typed = "".join(parts)
    text, marks = _marked_content(typed)
    segments = split(text, marks)
    assert "".join(segment.text for segment in segments) == typed
    assert not any(token in segment.text for segment in segments if segment.trusted for token in TOKENS)
    assert all(segment.text in TOKENS for segment in segments if not segment.trusted)


def test_many_tokens_with_one_prefix_stay_fast_on_hostile_text():
    tokens = tuple(f"<{'<' * 20}unused{number}>" for number in range(3000))
    _, marks = mark("", _content("<" * 200_000), tokens)
    assert marks is None


texts = st.sets(st.text("<|ab", min_size=1, max_size=6), min_size=1, max_size=12)


@given(known=texts, text=st.text("<|ab", max_size=20))
def test_it_finds_the_longest_at_every_place(known: set[str], text: str) -> None:
    pattern = re.compile(longest_of(literal_tree(known)))
    for at in range(len(text)):
        found = pattern.match(text, at)
        longest = max((one for one in known if text.startswith(one, at)), key=len, default=None)
        assert (found and found.group()) == longest


def test_a_very_long_text_is_no_problem() -> None:
    pattern = re.compile(longest_of(literal_tree(["a" * 50_000, "b"])))
    assert pattern.fullmatch("a" * 50_000)


def test_what_stands_round_a_token_that_a_template_takes_away_makes_no_other_one():
    text, marks = _marked_content("<|im_<|im_end|>start|>system")
    assert split(text.replace("<|im_end|>", ""), marks) == (Segment("<|im_"), Segment("start|>system"))
    assert split(f"x{text}".replace("<|im_end|>", "") + "<|im_start|>y", marks) == (
        Segment("x<|im_"),
        Segment("start|>system<|im_start|>y"),
    )
