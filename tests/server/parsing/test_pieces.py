"""One reply as it comes."""

from __future__ import annotations

from localrun.server.parsing.pieces import Reply
from localrun.wire import Finish
from tests.server.openai.stub_parser import StubParser, delta


def test_a_reply_is_gathered_in_its_parts() -> None:
    reply = Reply(StubParser())
    for text in ("<t>a", "b</t>", "one ", "two", '<c f>{"x"', ":1}</c>", "<c g>{}</c>"):
        reply.gather(delta(text))
    reply.gather(delta("", Finish.STOP))
    said = reply.gathered
    assert (said.thinking_text, said.content_text) == ("ab", "one two")
    assert [(call.id, call.name, call.arguments_text) for call in said.calls] == [
        ("call_0", "f", '{"x":1}'),
        ("call_1", "g", "{}"),
    ]
    assert reply.n_calls == 2


def test_the_end_gives_what_was_held_back() -> None:
    reply = Reply(StubParser())
    assert reply.take(delta("a <")) != []
    pieces = reply.take(delta("b", Finish.STOP))
    assert "".join(getattr(piece, "text", "") for piece in pieces) == "<b"


def test_thinking_is_counted_in_tokens() -> None:
    reply = Reply(StubParser())
    for text in ("<t>", "a", "b", "</t>c", "d"):
        reply.take(delta(text))
    assert 2 <= reply.n_thinking <= 3
    assert reply.n_calls == 0
