"""Replies made of parts, each with a header that says to whom it is.

gpt-oss (Harmony) writes several messages, each with its channel and its recipient:

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{...}<|call|>

`analysis` is thinking, `final` is content, a message to a function is a call, other commentary is content as well. The
prompt ends with `<|start|>assistant`, so the first header begins in the middle. The marks are control tokens, so a
reply must be asked for with them shown.

Muse Glimmer names the recipient alone: `to=self` is thinking, `to=user` content, and a message to a tool has its calls
in tags. The prompt ends with `<|start|>assistant`.

     to=self<|message|>...<|eom|><|start|>assistant to=get_time<|message|><atem:function_calls>...

Functionary 3.2 writes parts with the recipient in the first line: `all`, or the tool that is called. The prompt ends
with the `>>>` of the first part.

    all
    Let me look.>>>get_weather
    {"city": "Paris"}

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from localrun.server.parsing import xml_calls
from localrun.server.parsing.json_calls import MAX_NAME_CHARACTERS, checked_name, read_arguments
from localrun.server.parsing.source import CutShortError, MalformedError, MarkSet, Read, Reading, mark_set
from localrun.server.parsing.xml_calls import Tags

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
GLIMMER_ENDS = ("<|eom|>", "<|eot|>")
GLIMMER_CALLS = "<atem:function_calls>"
MAX_HEADER_CHARACTERS = 512

_HEADER_END = MarkSet((MESSAGE, *ENDS, *GLIMMER_ENDS))
_ATEM = Tags(
    "<atem:invoke name=", "</atem:invoke>", "<atem:parameter name=", "</atem:parameter>", (f"</{GLIMMER_CALLS[1:]}",)
)
_read_atem = xml_calls.reader(_ATEM)
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=<\||\s|$)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


def read_harmony(reply: Reading, dropped: frozenset[str]) -> Read[None]:
    """Reads until the end. A text without a header is content."""
    source = reply.source
    marks = mark_set(dropped | {START, CHANNEL, MESSAGE, *ENDS})
    begins_in_header = True
    while True:
        header = yield from _header(reply, is_first=begins_in_header)
        begins_in_header = False
        if header is None:
            emit = reply.content
        else:
            name = _called(header)
            if name is not None and (yield from _call(reply, name)):
                continue
            channel = _CHANNEL.search(header)
            emit = reply.thinking if channel is not None and channel[1] == "analysis" else reply.content
        while True:
            mark = yield from source.stream_until(marks, emit, glued=frozenset())
            if mark is None:
                return
            if mark in (START, CHANNEL, MESSAGE):
                source.at -= len(mark)
                break
            if mark in ENDS:
                break


def read_glimmer(reply: Reading, dropped: frozenset[str]) -> Read[None]:
    """Reads until the end. A text without a header, and a message to a tool that is no call, are content."""
    source = reply.source
    marks = mark_set(dropped | {START, MESSAGE, *GLIMMER_ENDS})
    begins_in_header = True
    while True:
        header = yield from _header(reply, is_first=begins_in_header)
        begins_in_header = False
        recipient = "user" if header is None else _called(header) or "user"
        if recipient not in ("self", "user") and (yield from _tagged_calls(reply)):
            continue
        emit = reply.thinking if recipient == "self" else reply.content
        mark: str | None = ""
        while mark not in (None, START, MESSAGE):
            mark = yield from source.stream_until(marks, emit, glued=frozenset())
        if mark is None:
            return
        source.at -= len(mark)


def _tagged_calls(reply: Reading) -> Read[bool]:
    """A block of calls and the mark behind it. What is none is left for the content."""

    def block() -> Read[None]:
        yield from reply.source.skip_space()
        if not (yield from reply.source.take(GLIMMER_CALLS)):
            raise MalformedError
        yield from _read_atem(reply)

    return (yield from _calls(reply, block, GLIMMER_ENDS))


def _header(reply: Reading, *, is_first: bool) -> Read[str | None]:
    """The header that comes next, taken with its `<|message|>`; None when what comes next is no header of a message."""
    source = reply.source
    source.commit()
    opening = yield from source.take_any((START, CHANNEL, MESSAGE, *((" to=",) if is_first else ())))
    source.at = 0
    if opening is None:
        return None
    try:
        header, mark = yield from source.until(_HEADER_END, limit=MAX_HEADER_CHARACTERS)
    except CutShortError:
        source.at = len(source.text)  # nothing but a header: there is no message to show
        return None
    except MalformedError:
        source.at = len(opening)
        return None
    source.commit()
    return header if mark == MESSAGE else None


def _call(reply: Reading, name: str) -> Read[bool]:
    """The arguments of a call and the mark behind them. What is no call is left for the content."""

    def arguments() -> Read[None]:
        yield from read_arguments(reply, checked_name(name))

    return (yield from _calls(reply, arguments, ENDS))


def _calls(reply: Reading, read: Callable[[], Read[None]], ends: tuple[str, ...]) -> Read[bool]:
    """What `read` takes, and one of `ends` behind it. What is no call is left for the content."""
    source = reply.source
    n_commits = source.n_commits
    try:
        yield from read()
    except MalformedError:
        if reply.drop_cut_call():
            return True
        if source.n_commits == n_commits:
            source.at = 0
        return False
    yield from source.skip_space()
    yield from source.take_any(ends)
    source.commit()
    return True


def _called(header: str) -> str | None:
    found = _RECIPIENT.search(header)
    return None if found is None or found.group(1) == "assistant" else found.group(1).removeprefix("functions.")


PART = ">>>"
_LINE_END = MarkSet(("\n",))


def read_functionary(reply: Reading, dropped: frozenset[str]) -> Read[None]:
    """Reads until the end. A part whose first line is no recipient is content as it stands."""
    source = reply.source
    marks = mark_set(dropped | {PART})
    yield from source.take(PART)
    while True:
        try:
            yield from _part(reply)
        except MalformedError:
            source.at = 0
        mark: str | None = ""
        while mark is not None and mark != PART:
            mark = yield from source.stream_until(marks, reply.content, glued=frozenset())
        if mark is None:
            return
        if not (yield from _is_recipient(reply)):
            reply.content(PART)


def _is_recipient(reply: Reading) -> Read[bool]:
    """Whether a known recipient stands in the line that begins. Takes nothing of it."""
    source = reply.source
    source.commit()
    for name in ("all", *reply.schemas):
        if (yield from source.take(f"{name}\n")):
            source.at = 0
            return True
    return False


def _part(reply: Reading) -> Read[None]:
    source = reply.source
    source.commit()
    line, _ = yield from source.until(_LINE_END, limit=MAX_NAME_CHARACTERS)
    name = checked_name(line)
    if name == "all":
        source.commit()
        return
    if name not in reply.schemas:
        raise MalformedError
    try:
        yield from read_arguments(reply, name)
    except MalformedError:
        if not reply.drop_cut_call():
            raise
    yield from source.skip_space()
    source.commit()
