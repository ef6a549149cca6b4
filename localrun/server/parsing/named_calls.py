"""Calls that name the tool outside of the JSON object of its arguments.

Mistral since 2024, Kimi, DeepSeek and Functionary. The object is streamed where that is allowed.

Pure. Does not: know the marks (`formats.py`), but for those inside of a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from localrun.server.parsing import json_calls
from localrun.server.parsing.json_calls import JsonScan, parse_json, read_value, stream_value
from localrun.server.parsing.reading import Reading
from localrun.server.parsing.source import MalformedError, MarkSet, Read, Source

MAX_NAME_CHARACTERS = 256
_NAME = re.compile(r"(?=.*\w)[\w.:/-]+")

_MISTRAL_NAME_END = MarkSet(("[ARGS]", "[CALL_ID]", "{"))
_MISTRAL_ID_END = MarkSet(("[ARGS]",))
_KIMI_NAME_END = MarkSet(("<|tool_call_argument_begin|>", "<|tool_call_end|>"))
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SEPARATOR = MarkSet(("<｜tool▁sep｜>", _DEEPSEEK_END))
_LINE_END = MarkSet(("\n", "{"))
_TAG_END = MarkSet((">", "\n"))


def read_arguments(reply: Reading, name: str) -> Read[None]:
    """The object that comes next, as the arguments of a call to `name`. Raises MalformedError."""
    source = reply.source
    yield from source.skip_space()
    if (yield from source.next_character()) != "{":
        raise MalformedError
    if reply.streams:
        reply.start_call(name)
        yield from stream_value(source, JsonScan(), reply.arguments)
        return
    arguments = parse_json((yield from read_value(source)))
    if not isinstance(arguments, Mapping):
        raise MalformedError
    reply.call(name, arguments)
    source.commit()


def read_mistral(reply: Reading) -> Read[None]:
    """What stands behind `[TOOL_CALLS]`: a JSON list, or since 2025 `get_weather[ARGS]{...}`, where some write
    `[CALL_ID]` and an id in between, or no `[ARGS]`."""
    yield from reply.source.skip_space()
    if (yield from reply.source.next_character()) == "[":
        yield from json_calls.reader(())(reply)
        return
    name, mark = yield from reply.source.until(_MISTRAL_NAME_END, limit=MAX_NAME_CHARACTERS)
    if mark == "{":
        reply.source.at -= 1
    elif mark == "[CALL_ID]":
        yield from reply.source.until(_MISTRAL_ID_END, limit=MAX_NAME_CHARACTERS)
    yield from read_arguments(reply, checked_name(name))


def read_kimi(reply: Reading) -> Read[None]:
    """`<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, any number
    inside of a section."""
    source = reply.source
    while True:
        yield from source.skip_space()
        if (yield from source.take("<|tool_call_begin|>")):
            written, _ = yield from source.until(_KIMI_NAME_END, limit=MAX_NAME_CHARACTERS)
            name = written.strip().removeprefix("functions.")
            head, colon, index = name.rpartition(":")
            yield from read_arguments(reply, checked_name(head if colon and index.isdigit() else name))
            yield from source.skip_space()
            yield from source.take("<|tool_call_end|>")
        elif (yield from source.take("<|tool_calls_section_end|>")) or not (yield from source.next_character()):
            return
        else:
            raise MalformedError
        source.commit()


def read_deepseek(reply: Reading) -> Read[None]:
    """R1 and V3 write the kind, the name and a fenced block; V3.1 the name and the bare object."""
    source = reply.source
    while True:
        yield from source.skip_space()
        if (yield from source.take(_DEEPSEEK_BEGIN)):
            first, mark = yield from source.until(_DEEPSEEK_SEPARATOR, limit=MAX_NAME_CHARACTERS)
            if mark == _DEEPSEEK_END:
                raise MalformedError
            if first.strip() == "function":
                yield from _read_fenced(reply)
            else:
                yield from read_arguments(reply, checked_name(first))
            yield from source.skip_space()
            yield from source.take(_DEEPSEEK_END)
        elif (yield from source.take("<｜tool▁calls▁end｜>")) or not (yield from source.next_character()):
            return
        else:
            raise MalformedError
        source.commit()


def read_tagged(reply: Reading) -> Read[None]:
    """Functionary 3.1: `get_weather>{...}</function>` behind `<function=`."""
    name, mark = yield from reply.source.until(_TAG_END, limit=MAX_NAME_CHARACTERS)
    if mark != ">":
        raise MalformedError
    yield from read_arguments(reply, checked_name(name))
    yield from reply.source.skip_space()
    yield from reply.source.take("</function>")


def checked_name(text: str) -> str:
    """The name in what stands at a name's place. Raises MalformedError when that is no name."""
    name = text.strip()
    if len(name) > MAX_NAME_CHARACTERS or not _NAME.fullmatch(name):
        raise MalformedError
    return name


def _read_fenced(reply: Reading) -> Read[None]:
    source: Source = reply.source
    name, mark = yield from source.until(_LINE_END, limit=MAX_NAME_CHARACTERS)
    if mark == "{":
        source.at -= 1
    yield from source.skip_space()
    yield from source.take_any(("```json", "```"))
    yield from read_arguments(reply, checked_name(name))
    yield from source.skip_space()
    yield from source.take("```")
