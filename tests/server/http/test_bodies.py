"""Strict JSON into structs, with errors that name the field."""

from __future__ import annotations

import asyncio
import json
import sys
from types import FrameType
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.errors import BadRequest
from localrun.server.http import bodies
from localrun.server.http.bodies import LARGE_BYTES
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Shape


class Inner(msgspec.Struct):
    k: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1


class Outer(msgspec.Struct):
    name: str
    inner: Inner | None = None
    items: list[Inner] = []


def test_unknown_fields_are_ignored() -> None:
    body = bodies.decode(b'{"name": "a", "other": {"deep": [1, 2.5, null]}, "inner": {"k": 3, "x": 1}}', Outer)
    assert body.name == "a"
    assert body.inner is not None
    assert body.inner.k == 3


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        (b"{}", "name", "name is required"),
        (b'{"name": 1}', "name", "expected `str`, got `int`"),
        (b'{"name": "a", "inner": {"k": 0}}', "inner.k", ">= 1"),
        (b'{"name": "a", "inner": {"k": 1.5}}', "inner.k", "`float`"),
        (b'{"name": "a", "inner": {"k": 9223372036854775808000}}', "inner.k", "<= 100"),
        (b'{"name": "a", "items": [{}, {"k": "x"}]}', "items[1].k", "got `str`"),
        (b'{"name": "a", "name": "b"}', "name", "twice"),
        (b'{"name": "a", "other": {"q": 1, "q": 2}}', "q", "twice"),
        (b'{"name": "a", "other": {"q": 1, "\\u0071": {}}}', "q", "twice"),
    ],
)
@pytest.mark.parametrize("padding", [b"", b" " * LARGE_BYTES], ids=["small", "large"])
def test_what_is_out_of_shape_is_named(text: bytes, padding: bytes, field: str, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        bodies.decode(text + padding, Outer)
    assert caught.value.field == field
    assert said in caught.value.message
    assert field in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        b"", b"  \n", b"{", b"[]", b"null", b'"text"', b'{"name": "a"} trailing', b"{'name': 'a'}", b'{"name": "a",}',
        b'{"name": "a", "x": NaN}', b'{"name": "a", "x": -Infinity}', b'{"name": "\\ud800"}', b'{"name": "\\udc00 x"}',
        b'{"name": "a", "x": "\\ud800 or so"}', b'{"name": "\xff"}', b'{"name": "a", "x": "\xc3"}',
        b'\xef\xbb\xbf{"name": "a"}', '{"name": "a"}'.encode("utf-16"),
        b'{"name": "a", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"name": "a", "x": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
        b'{"name": "a", "inner": {"k": ' + b"9" * 5000 + b"}}",
        b'{"name": "a", "x": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_what_is_not_plain_json_is_refused(text: bytes) -> None:
    with pytest.raises(BadRequest):
        bodies.decode(text, Outer)


def test_whole_characters_written_as_escapes_pass() -> None:
    assert bodies.decode(b'{"name": "\\ud83d\\ude00"}', Outer).name == "\U0001f600"


class Pairs(list[tuple[str, Any]]):
    """An object with any keys, also the same one twice."""


KEYS = st.sampled_from(["a", "b", "{", '"', "\\", '":', "é"])
LEAVES = st.none() | st.integers() | st.text('a":{}[]\\, é', max_size=5)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.lists(st.tuples(KEYS, inner), max_size=3).map(Pairs)
)


def written(value: Any, *, ascii_only: bool) -> str:
    if isinstance(value, Pairs):
        pairs = (
            f"{json.dumps(key, ensure_ascii=ascii_only)} : {written(each, ascii_only=ascii_only)}"
            for key, each in value
        )
        return "{" + ", ".join(pairs) + " }"
    if isinstance(value, list):
        return "[ " + ",".join(written(each, ascii_only=ascii_only) for each in value) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


def said_of(text: str) -> str:
    try:
        bodies.decode(text.encode(), Any)
    except BadRequest as refusal:
        return refusal.message
    return ""


@given(VALUES, st.booleans())
def test_a_key_twice_is_found_in_large_bodies_as_in_small_ones(value: Any, ascii_only: bool) -> None:
    text = written(value, ascii_only=ascii_only)
    assert bool(said_of(text)) == bool(said_of(text + " " * LARGE_BYTES))


@pytest.mark.parametrize("piece", ["1,", "[],", '"text",', " ", '{"a": [1, 2]}, '])
def test_a_large_body_is_looked_at_in_short_steps(piece: str) -> None:
    """Threads take turns between lines of Python, not within a call of C that reads it all."""
    text = f"[{piece * (LARGE_BYTES * 4 // len(piece))}1]"
    n_lines = 0

    def count(frame: FrameType, event: str, given: object) -> Any:
        nonlocal n_lines
        n_lines += event == "line"
        return count if frame.f_code.co_filename == bodies.__file__ else None

    tracing = sys.gettrace()
    sys.settrace(count)
    try:
        bodies.decode(text.encode(), Any)
    finally:
        sys.settrace(tracing)
    assert n_lines > len(text) / 65_536


async def test_a_large_body_is_looked_at_beside_the_event_loop() -> None:
    text = b'{"name": "a", "other": [' + b",".join([b'{"k": 1}'] * 300_000) + b"]}"
    sent = [{"type": "http.request", "body": text, "more_body": False}]

    async def receive() -> Any:
        return sent.pop()

    async def send(_: Any) -> None:
        raise AssertionError

    reading = asyncio.create_task(bodies.read(Exchange({"path": "/api/chat"}, receive, send, Shape.OLLAMA), Outer))
    n_turns = 0
    while not reading.done():
        n_turns += 1
        await asyncio.sleep(0.001)
    assert reading.result().name == "a"
    assert n_turns > 5
