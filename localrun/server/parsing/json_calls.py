"""JSON values in text that is still arriving, and calls whose arguments are one: with the tool's name in the same
object, as one, several, or a list of them, or with the name before the object.

    {"name": "get_weather", "arguments": {"city": "Paris"}}

Hermes and Qwen put each between `<tool_call>` tags, Mistral, Granite, Command-R and Nemotron a list behind a mark,
Llama 3 nothing round it at all. The keys differ; all that are in use are known here, whatever the mark. Mistral since
2024, Kimi, DeepSeek and Functionary name the tool outside. Arguments are streamed where that is allowed.
Pure. Does not: know the marks (`formats.py`), but for some inside of a call.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from localrun.server.parsing.source import CallReader, CutShortError, MalformedError, MarkSet, Read, Reading, Source

# Deeper nesting is nobody's arguments; Python's own parser gives up at about its recursion limit.
MAX_DEPTH = 200

_IN_TEXT = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r"[\s,:0-9eE+\-.truefalsn]*")
_CLOSING = {"{": "}", "[": "]"}


class JsonScan:
    """Finds the end of an object or array. `depth` 1 and up begins inside of so many objects."""

    def __init__(self, depth: int = 0) -> None:
        self._open = ["}"] * depth
        self._in_text = False
        self.error_at = 0

    def advance(self, text: str, at: int) -> tuple[int, bool]:
        """Where the scan got to from `at`, and whether the value ended there. Raises MalformedError at
        `error_at`.

        Stops before a backslash whose next character has not come yet.
        """
        while at < len(text):
            if self._in_text:
                found = _IN_TEXT.match(text, at)
                assert found is not None
                at = found.end()
                if at >= len(text):
                    break
                if text[at] == "\\":
                    if at + 1 >= len(text):
                        break
                    at += 2
                else:
                    self._in_text = False
                    at += 1
                continue
            if self._open:
                found = _BETWEEN.match(text, at)
                assert found is not None
                at = found.end()
                if at >= len(text):
                    break
            self.error_at = at
            at += 1
            if self._structure(text[at - 1]):
                return at, True
        return at, False

    def _structure(self, character: str) -> bool:
        """Takes a bracket or a quote; whether the value ends with it."""
        if character == '"' and self._open:
            self._in_text = True
        elif character in _CLOSING and len(self._open) < MAX_DEPTH:
            self._open.append(_CLOSING[character])
        elif self._open and character == self._open[-1]:
            self._open.pop()
            return not self._open
        else:
            raise MalformedError
        return False


def read_value(source: Source) -> Read[str]:
    """The text of the object or array that comes next, taken. Raises MalformedError, at the end too."""
    scan, start = JsonScan(), source.at
    while True:
        source.at, is_over = scan.advance(source.text, source.at)
        if is_over:
            return source.text[start : source.at]
        if not (yield from source.wait()):
            raise CutShortError


def stream_value(source: Source, scan: JsonScan, emit: Callable[[str], None]) -> Read[None]:
    """As `read_value`, handing the text on and committing it as it comes."""
    while True:
        start = source.at
        try:
            source.at, is_over = scan.advance(source.text, start)
        except MalformedError:
            emit(source.text[start : scan.error_at])
            source.at = scan.error_at
            source.commit()
            raise
        emit(source.text[start : source.at])
        source.commit()
        if is_over:
            return
        if not (yield from source.wait()):
            raise CutShortError


def parse_json(text: str) -> Any:
    """The value, also with line breaks inside texts, which models write. Raises MalformedError, also for a number that
    is too large to be written again."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        raise MalformedError from None


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_OTHER_KEYS = ("id", "type", "tool_call_id")
# Command-R's word for "no tool".
_NO_TOOL = ("directly_answer", "directly-answer")

_HEAD = re.compile(
    r'\{\s*"(?:name|tool_name|function)"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters|args)"\s*:\s*(?=\{)'
)
_BETWEEN_CALLS = re.compile(r"[\s,;]*")
# Enough to tell by an object's beginning whether it can be a call.
_HEAD_CHARACTERS = 512


def reader(closing: tuple[str, ...], *, fences: bool = False) -> CallReader:
    """A reader of what follows an opening mark: calls or lists of calls until one of `closing`, or until something else
    comes. With `fences` they may stand in a Markdown code block."""

    def read(reply: Reading) -> Read[None]:
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
            yield from source.skip(_BETWEEN_CALLS)
        if fences:
            yield from source.take("```")
            yield from source.skip_space()
        yield from source.take_any(closing)

    return read


def read_opened_list(reply: Reading) -> Read[None]:
    """The rest of a list whose bracket belongs to the mark."""
    reply.source.at -= 1
    yield from _list(reply)


def read_unmarked(reply: Reading) -> Read[None]:
    """Calls of known tools without any mark. Raises MalformedError as soon as the text cannot be one."""
    while True:
        yield from _object(reply, only_known=True)
        reply.source.commit()
        at = reply.source.at
        yield from reply.source.skip(_BETWEEN_CALLS)
        if (yield from reply.source.next_character()) != "{":
            if (yield from reply.source.next_character()):
                reply.source.at = at
            return


def read_bare(reply: Reading) -> Read[None]:
    """The same of a model that was to write a mark, perhaps in a code block instead. No grammar holds it to calls."""
    streams, reply.streams = reply.streams, False
    try:
        is_fenced = yield from reply.source.take_any(("```json", "```"))
        yield from reply.source.skip_space()
        yield from read_unmarked(reply)
        if is_fenced:
            yield from reply.source.skip_space()
            yield from reply.source.take("```")
    finally:
        reply.streams = streams


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
        arguments = parse_json(arguments) if arguments.strip() else {}
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise MalformedError
    return arguments


def _list(reply: Reading) -> Read[None]:
    source = reply.source
    source.at += 1
    while True:
        yield from source.skip(_BETWEEN_CALLS)
        if (yield from source.take("]")):
            return
        if (yield from source.next_character()) != "{":
            raise MalformedError
        yield from _object(reply)
        source.commit()


def _object(reply: Reading, *, only_known: bool = False) -> Read[None]:
    source = reply.source
    start, scan, is_over = source.at, JsonScan(), False
    while not is_over:
        head = _HEAD.match(source.text, start) if reply.streams else None
        if head is not None and (not only_known or head.group(1) in reply.schemas):
            source.at = head.end()
            reply.start_call(head.group(1))
            yield from stream_value(source, JsonScan(), reply.arguments)
            yield from stream_value(source, JsonScan(depth=1), _drop)
            return
        if only_known and not _may_be_call(source.text[start : start + _HEAD_CHARACTERS], reply.schemas):
            raise MalformedError
        source.at, is_over = scan.advance(source.text, source.at)
        if not is_over and not (yield from source.wait()):
            raise CutShortError
    text = source.text[start : source.at]
    if only_known and not any(f'"{key}"' in text for key in _ARGUMENT_KEYS):
        raise MalformedError  # an answer may well be an object with a tool's name
    for name, arguments in calls_of(parse_json(text), reply.schemas):
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


def _drop(text: str) -> None:
    """The rest of an object behind its arguments says nothing that is wanted."""


MAX_NAME_CHARACTERS = 256
_NAME = re.compile(r"(?=.*\w)[\w.:/-]+")

_MISTRAL_NAME_END = MarkSet(("[ARGS]", "[CALL_ID]", "{"))
_MISTRAL_ID_END = MarkSet(("[ARGS]",))
_KIMI_NAME = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?", re.DOTALL)
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
    reply.call(name, parse_json((yield from read_value(source))))
    source.commit()


def read_mistral(reply: Reading) -> Read[None]:
    """What stands behind `[TOOL_CALLS]`: a JSON list, or since 2025 `get_weather[ARGS]{...}`, where some write
    `[CALL_ID]` and an id in between, or no `[ARGS]`."""
    yield from reply.source.skip_space()
    if (yield from reply.source.next_character()) == "[":
        yield from reader(())(reply)
        return
    name, mark = yield from reply.source.until(_MISTRAL_NAME_END, limit=MAX_NAME_CHARACTERS)
    if mark == "{":
        reply.source.at -= 1
    elif mark == "[CALL_ID]":
        yield from reply.source.until(_MISTRAL_ID_END, limit=MAX_NAME_CHARACTERS)
    yield from read_arguments(reply, checked_name(name))


def section_reader(
    begin: str,
    name_end: str,
    end: str,
    closing: tuple[str, ...],
    read_call: Callable[[Reading, str], Read[None]],
    *,
    is_begun: bool = False,
) -> CallReader:
    """A reader of a section of calls, each between `begin` and `end`, up to one of `closing`. `read_call` reads one
    from the text before `name_end` on. If it `is_begun`, its mark was forgotten, and the first call's was read."""
    name_ends = MarkSet((name_end, end))

    def read(reply: Reading) -> Read[None]:
        source = reply.source
        begins = is_begun
        while True:
            yield from source.skip_space()
            if begins or (yield from source.take(begin)):
                begins = False
                written, mark = yield from source.until(name_ends, limit=MAX_NAME_CHARACTERS)
                if mark == end:
                    raise MalformedError
                yield from read_call(reply, written)
                yield from source.skip_space()
                yield from source.take(end)
            elif (yield from source.take_any(closing)) or not (yield from source.next_character()):
                return
            else:
                raise MalformedError
            source.commit()

    return read


def read_kimi_call(reply: Reading, written: str) -> Read[None]:
    """`functions.get_weather:0` is before the object."""
    found = _KIMI_NAME.fullmatch(written.strip())
    assert found is not None
    yield from read_arguments(reply, checked_name(found.group(1)))


def read_deepseek_call(reply: Reading, written: str) -> Read[None]:
    """R1 and V3 write the kind, the name and a fenced block; V3.1 the name and the bare object."""
    source = reply.source
    is_fenced = written.strip() == "function"
    if is_fenced:
        written, mark = yield from source.until(_LINE_END, limit=MAX_NAME_CHARACTERS)
        if mark == "{":
            source.at -= 1
        yield from source.skip_space()
        yield from source.take_any(("```json", "```"))
    yield from read_arguments(reply, checked_name(written))
    if is_fenced:
        yield from source.skip_space()
        yield from source.take("```")


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
