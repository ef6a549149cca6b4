"""Calls written in tags, every argument in one of its own: Qwen3-Coder, GLM, MiniMax, DeepSeek 3.2, Seed.

    <tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>

The values are bare text, so their types come from the tool's schema (`typed_value.py`).

Pure. Does not: know the mark that opens a call (`formats.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from localrun.server.replies import json_text
from localrun.server.replies.mark_set import MarkSet
from localrun.server.replies.named_calls import MAX_NAME_CHARACTERS, checked_name
from localrun.server.replies.reply import Reply
from localrun.server.replies.source import MalformedError, Read
from localrun.server.replies.typed_value import typed


@dataclass(frozen=True)
class Tags:
    """How a family writes calls. `call` and `parameter` begin a tag that goes on with a name and ends with `>`; one of
    `closing` ends a block of calls."""

    call: str
    call_end: str
    parameter: str
    parameter_end: str
    closing: tuple[str, ...]

    @cached_property
    def value_marks(self) -> MarkSet:
        return MarkSet((self.parameter_end, self.parameter, self.call_end, *self.closing))


_NAME_END = MarkSet((">", "\n"))
# A name, in quotes or not, and what DeepSeek says of the value.
_ATTRIBUTE = re.compile(r'^"?([^"\s]+)"?(?:\s+string\s*=\s*"(true|false)")?\s*"?$')


def reader(tags: Tags) -> Callable[[Reply], Read[None]]:
    """A reader of what follows the opening mark: calls until one of `tags.closing`, or until something else comes."""

    def read(reply: Reply) -> Read[None]:
        source = reply.source
        has_call = False
        while True:
            yield from source.skip_space()
            if not (yield from source.take(tags.call)):
                break
            yield from _read_call(reply, tags)
            has_call = True
            source.commit()
        if not has_call:
            raise MalformedError
        yield from source.take_any(tags.closing)

    return read


def read_one(tags: Tags) -> Callable[[Reply], Read[None]]:
    """A reader for when the opening mark is itself the beginning of a call's tag."""

    def read(reply: Reply) -> Read[None]:
        yield from _read_call(reply, tags)
        yield from reply.source.skip_space()
        yield from reply.source.take_any(tags.closing)

    return read


def read_glm(reply: Reply) -> Read[None]:
    """GLM: `get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>` behind `<tool_call>`."""
    source = reply.source
    written, mark = yield from source.until(_GLM_NAME_END, limit=MAX_NAME_CHARACTERS)
    name = checked_name(written)
    parameters = reply.schemas.get(name, {})
    arguments: dict[str, Any] = {}
    while mark != "</tool_call>":
        key, _ = yield from source.until(_GLM_KEY_END, limit=MAX_NAME_CHARACTERS)
        yield from source.skip_space()
        if not (yield from source.take("<arg_value>")):
            raise MalformedError
        value, _ = yield from source.until(_GLM_VALUE_END)
        arguments[key.strip()] = typed(value, key.strip(), parameters)
        yield from source.skip_space()
        following = yield from source.take_any(("<arg_key>", "</tool_call>"))
        if following is None:
            raise MalformedError
        mark = following
    reply.call(name, arguments)


_GLM_NAME_END = MarkSet(("<arg_key>", "</tool_call>"))
_GLM_KEY_END = MarkSet(("</arg_key>",))
_GLM_VALUE_END = MarkSet(("</arg_value>",))


def _read_call(reply: Reply, tags: Tags) -> Read[None]:
    source = reply.source
    name, _ = yield from _read_name(reply)
    name = checked_name(name)
    parameters = reply.schemas.get(name, {})
    arguments: dict[str, Any] = {}
    while True:
        yield from source.skip_space()
        if (yield from source.take(tags.parameter)):
            key, is_text = yield from _read_name(reply)
            text, mark = yield from source.until(tags.value_marks)
            if mark != tags.parameter_end:  # a closing tag forgotten: the value ends where the next thing begins
                source.at -= len(mark)
            value = _without_line_ends(text)
            arguments[key] = _value(value, key, parameters, is_text)
        elif (yield from source.take(tags.call_end)):
            break
        else:
            raise MalformedError
    reply.call(name, arguments)


def _read_name(reply: Reply) -> Read[tuple[str, bool | None]]:
    """A tag's name up to its end, and what it says of the value being a text, if anything."""
    written, mark = yield from reply.source.until(_NAME_END, limit=MAX_NAME_CHARACTERS)
    found = _ATTRIBUTE.match(written.strip())
    if mark == "\n" or found is None:
        raise MalformedError
    return found.group(1), None if found.group(2) is None else found.group(2) == "true"


def _value(text: str, key: str, parameters: Any, is_text: bool | None) -> Any:
    if is_text is None:
        return typed(text, key, parameters)
    if is_text:
        return text
    return json_text.parse(text)


def _without_line_ends(text: str) -> str:
    """The line breaks that the tags stand on are not the value's."""
    return text.removeprefix("\n").removesuffix("\n")
