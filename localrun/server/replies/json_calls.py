"""Calls written as JSON objects that carry the tool's name and its arguments: one, several, or a list of them.

    {"name": "get_weather", "arguments": {"city": "Paris"}}

Hermes and Qwen put each between `<tool_call>` tags, Mistral, Granite, Command-R and Nemotron a list behind a mark,
Llama 3 nothing round it at all. The keys differ; all that are in use are known here, whatever the mark.

Pure. Does not: know the marks (`formats.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from localrun.server.replies import json_text
from localrun.server.replies.json_text import JsonScan
from localrun.server.replies.reply import Reply
from localrun.server.replies.source import CutShortError, MalformedError, Read, Source

_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_OTHER_KEYS = ("id", "type", "tool_call_id")
# Command-R's word for "no tool".
_NO_TOOL = ("directly_answer", "directly-answer")

_HEAD = re.compile(
    r'\{\s*"(?:name|tool_name|function)"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters|args)"\s*:\s*(?=\{)'
)
_BETWEEN = re.compile(r"[\s,;]*")
# Enough to tell by an object's beginning whether it can be a call.
_HEAD_CHARACTERS = 512


def reader(closing: tuple[str, ...], *, fences: bool = False) -> Callable[[Reply], Read[None]]:
    """A reader of what follows an opening mark: calls or lists of calls until one of `closing`, or until something else
    comes. With `fences` they may stand in a Markdown code block."""

    def read(reply: Reply) -> Read[None]:
        source = reply.source
        if fences:
            yield from source.skip_space()
            yield from source.take_any(("```json", "```"))
        is_first = True
        while True:
            yield from source.skip_space()
            character = yield from source.next_character()
            if character == "{":
                yield from _object(reply)
            elif character == "[":
                yield from _list(reply)
            elif is_first:
                raise MalformedError
            else:
                break
            is_first = False
            source.commit()
            yield from _skip_between(source)
        if fences:
            yield from source.take("```")
            yield from source.skip_space()
        yield from source.take_any(closing)

    return read


def read_opened_list(reply: Reply) -> Read[None]:
    """The rest of a list whose bracket belongs to the mark."""
    reply.source.at -= 1
    yield from _list(reply)


def read_unmarked(reply: Reply) -> Read[None]:
    """Calls of known tools without any mark. Raises MalformedError as soon as the text cannot be one."""
    while True:
        yield from _object(reply, only_known=True)
        reply.source.commit()
        at = reply.source.at
        yield from _skip_between(reply.source)
        if (yield from reply.source.next_character()) != "{":
            if (yield from reply.source.next_character()):
                reply.source.at = at
            return


def calls_of(value: Any, known: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The (name, arguments) of a parsed object, or of each in a list. Raises MalformedError for anything else."""
    items = value if isinstance(value, list) else [value]
    return [_call_of(item, known) for item in items]


def _call_of(item: Any, known: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if not isinstance(item, dict):
        raise MalformedError
    if isinstance(item.get("function"), dict):
        item = item["function"]
    name = next((item[key] for key in _NAME_KEYS if isinstance(item.get(key), str) and item[key]), None)
    if name is None:
        if len(item) == 1 and next(iter(item)) in known:  # Apertus: {"get_weather": {"city": "Paris"}}
            ((name, arguments),) = item.items()
            return name, _checked(arguments)
        raise MalformedError
    return name, _checked(next((item[key] for key in _ARGUMENT_KEYS if key in item), {}))


def _checked(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):  # JSON inside of JSON, as OpenAI's API has it
        arguments = json_text.parse(arguments) if arguments.strip() else {}
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise MalformedError
    return arguments


def _list(reply: Reply) -> Read[None]:
    source = reply.source
    source.at += 1
    while True:
        yield from _skip_between(source)
        if (yield from source.take("]")):
            return
        if (yield from source.next_character()) != "{":
            raise MalformedError
        yield from _object(reply)
        source.commit()


def _object(reply: Reply, *, only_known: bool = False) -> Read[None]:
    source = reply.source
    start, scan, is_over = source.at, JsonScan(), False
    while not is_over:
        head = _HEAD.match(source.text, start) if reply.streams else None
        if head is not None and (not only_known or head.group(1) in reply.schemas):
            source.at = head.end()
            reply.start_call(head.group(1))
            yield from json_text.stream_value(source, JsonScan(), reply.arguments)
            yield from json_text.stream_value(source, JsonScan(depth=1), _drop)
            return
        if only_known and not _may_be_call(source.text[start : start + _HEAD_CHARACTERS], reply.schemas):
            raise MalformedError
        source.at, is_over = scan.advance(source.text, source.at)
        if not is_over and not (yield from source.wait()):
            raise CutShortError
    text = source.text[start : source.at]
    for name, arguments in calls_of(json_text.parse(text), reply.schemas):
        if only_known and name not in reply.schemas:
            raise MalformedError
        if name not in _NO_TOOL or name in reply.schemas:
            reply.call(name, arguments)


def _may_be_call(text: str, known: Mapping[str, Any]) -> bool:
    """Whether an object that begins so can be a call of a known tool."""
    rest = text[1:].lstrip()
    for key in (*_NAME_KEYS, *_ARGUMENT_KEYS, *_OTHER_KEYS):
        quoted = f'"{key}"'
        if quoted.startswith(rest):
            return True
        if rest.startswith(quoted):
            after = rest[len(quoted) :].lstrip()
            if not after.startswith(":"):
                return not after
            value = after[1:].lstrip()
            if key not in _NAME_KEYS or value.startswith("{"):
                return True
            names = [f'"{name}"' for name in known]
            return any(name.startswith(value) or value.startswith(name) for name in names)
    return False


def _skip_between(source: Source) -> Read[None]:
    while True:
        found = _BETWEEN.match(source.text, source.at)
        assert found is not None
        source.at = found.end()
        if source.at < len(source.text) or not (yield from source.wait()):
            return


def _drop(text: str) -> None:
    """The rest of an object behind its arguments says nothing that is wanted."""
