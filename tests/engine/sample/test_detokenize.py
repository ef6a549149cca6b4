from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.engine.sample.text import TextStream

# Bytes that cut characters in every place, and letters that make stop strings begin and break off.
pieces = st.lists(
    st.sampled_from([b"a", b"b", b"ab", b"ba", b"", b" ", "é".encode(), b"\xc3", b"\xa9", b"\xf0\x9f", b"\xa6\x8a"]),
    max_size=30,
)
stops = st.lists(st.sampled_from(["a", "ab", "aba", "abb", "bab", "é", "aé", "\ufffd", "ba ba"]), max_size=3)


def text_of(parts: list[bytes]) -> str:
    """All of it but the part of a character at the end."""
    return codecs.utf_8_decode(b"".join(parts), "replace", False)[0]


def fed(stop: tuple[str, ...], parts: list[bytes]) -> tuple[list[str], str | None]:
    """What each piece and the end made certain, and the stop string that matched."""
    stream = TextStream(stop)
    texts = []
    for part in parts:
        texts.append(stream.feed(part))
        if stream.stopped is not None:
            break
    texts.append(stream.finish())
    return texts, stream.stopped


@given(pieces, stops)
def test_whatever_the_cuts_no_stop_string_shows_and_nothing_is_taken_back(parts: list[bytes], stop: list[str]):
    texts, stopped = fed(tuple(stop), parts)
    shown = "".join(texts)
    whole = text_of(parts)
    assert whole.startswith(shown)
    assert not any(text in shown for text in stop)
    if stopped is None:
        assert shown == whole
    else:
        assert whole[len(shown) :].startswith(stopped)


@given(pieces, st.sampled_from(["a", "ab", "aba", "é", "ba ba"]))
def test_one_stop_string_cuts_where_it_first_stands(parts: list[bytes], stop: str):
    texts, stopped = fed((stop,), parts)
    whole = text_of(parts)
    assert "".join(texts) == whole.split(stop)[0]
    assert (stopped == stop) == (stop in whole)


@given(pieces)
def test_without_stop_strings_a_character_shows_as_soon_as_it_is_whole(parts: list[bytes]):
    stream, seen = TextStream(()), b""
    shown = ""
    for part in parts:
        seen += part
        shown += stream.feed(part)
        complete = seen.decode("utf-8", "replace").rstrip("\ufffd")
        assert shown.rstrip("\ufffd") == complete
    assert stream.finish() == ""


def test_text_is_held_back_only_while_it_could_become_a_stop_string():
    stream = TextStream(("###",))
    assert [stream.feed(part) for part in (b"one #", b"#", b" two", b"##")] == ["one ", "", "## two", ""]
    assert stream.finish() == "##"
    assert stream.stopped is None


def test_a_stop_string_may_begin_in_one_token_and_end_three_tokens_later():
    stream = TextStream(("<end>",))
    assert [stream.feed(part) for part in (b"so <", b"en", b"d", b"> and more")] == ["so ", "", "", ""]
    assert stream.stopped == "<end>"
    assert stream.feed(b"nothing") == ""
    assert stream.finish() == ""


@pytest.mark.parametrize(("stop", "expected"), [(("ab", "abc"), "abc"), (("c", "bc"), "bc"), (("c", "ab"), "ab")])
def test_of_several_the_first_to_begin_wins_and_then_the_longest(stop: tuple[str, ...], expected: str):
    texts, stopped = fed(stop, [b"xabcy"])
    assert stopped == expected
    assert "".join(texts) == "xabcy".split(expected)[0]


def test_a_part_of_a_character_at_the_end_is_left_out_and_one_within_is_shown_as_unknown():
    stream = TextStream(("###",))
    assert [stream.feed(part) for part in (b"\xf0", b"ok #", b"\xf0\x9f")] == ["", "\ufffdok ", ""]
    assert stream.finish() == "#"
