"""Calls written in tags, every argument in one of its own: Qwen3-Coder, GLM, MiniMax, DeepSeek 3.2, Seed.

    <tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>

The values are bare text: only the tool's schema tells whether `3` is a number or a text (`typed`).
Pure. Does not: know the mark that opens a call (`formats.py`), or validate; a text that is no number where a number is
wanted stays a text, for the tool to refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from localrun.server.parsing import json_calls
from localrun.server.parsing.json_calls import MAX_NAME_CHARACTERS, checked_name, parse_json, read_arguments
from localrun.server.parsing.source import CallReader, CutShortError, MalformedError, MarkSet, Read, Reading, Source

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
# A text that does not end is taken to the end, so that it is read once.
_PYTHON = re.compile(
    r"""'(?P<text>[^'\\]*+(?:\\.[^'\\]*+)*+)(?:'|\Z)|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|\b(?P<word>True|False|None)\b""",
    re.DOTALL,
)
_QUOTES = re.compile(r"""\\.|\"""", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_MAX_DEPTH = 100
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,300}")


def typed(text: str, name: str, parameters: Mapping[str, Any]) -> Any:
    """The value of the parameter `name` written as `text`.

    A parameter whose schema allows texts alone is taken as it stands; any other as JSON if it is that, and of an
    allowed type where there also are texts.
    """
    allowed = allowed_types(name, parameters)
    if allowed == {"string"}:
        return text
    stripped = text.strip()
    if stripped in _PYTHON_WORDS:
        value: Any = _PYTHON_WORDS[stripped]
    elif allowed and "string" not in allowed and stripped.lower() in _WORDS:
        return _WORDS[stripped.lower()]
    elif "integer" in allowed and "string" not in allowed and _WHOLE_NUMBER.fullmatch(stripped):
        value = int(stripped)
    else:
        try:
            value = parse_json(stripped)
        except MalformedError:
            return text if "string" in allowed else _python_literal(stripped, text)
    return text if "string" in allowed and not (_type_names(value) & allowed) else value


def _python_literal(written: str, text: str) -> Any:
    """An object or a list that is written as Python's, as Seed's template does; any other is the `text` it is. Python's
    own reader of literals is not used: it follows signs by recursion, until its stack ends and the process with it."""
    if not written.startswith(("{", "[")):
        return text
    try:
        return parse_json(_PYTHON.sub(_in_json, written))
    except MalformedError:
        return text


def _in_json(found: re.Match[str]) -> str:
    if found["word"]:
        return json.dumps(_PYTHON_WORDS[found["word"]])
    if found["text"] is None:
        return found[0]
    return '"' + _QUOTES.sub(lambda quote: {'"': r"\"", r"\'": "'"}.get(quote[0], quote[0]), found["text"]) + '"'


def nested(text: str, closing: str, name: str, parameters: Mapping[str, Any]) -> Any:
    """As `typed`, where objects may be written as elements, and lists as elements `item`: MiniMax M3. Their tags are as
    those of the parameter, whose closing one begins with `closing`; nothing for no such tags."""
    mark, allowed = closing.removesuffix("</"), allowed_types(name, parameters)
    may_nest = closing and (allowed & {"object", "array"} or (mark and not allowed))  # text may be marked up
    if not may_nest or not text.lstrip().startswith(f"{mark}<"):
        return typed(text, name, parameters)
    elements: list[list[tuple[str, Any]]] = [[]]
    names, at = [name], 0
    for tag in re.finditer(rf"{re.escape(mark)}<(/?)([^<>\s]+)>", text):
        between, at = text[at : tag.start()], tag.end()
        is_apart = not between.strip()
        if not tag[1] and len(names) <= _MAX_DEPTH and is_apart:
            elements.append([])
            names.append(tag[2])
        elif tag[1] and len(names) > 1 and names.pop() == tag[2] and (is_apart or not elements[-1]):
            inside = elements.pop()
            elements[-1].append((tag[2], inside or between))
        else:
            return typed(text, name, parameters)
    if len(names) > 1 or text[at:].strip():
        return typed(text, name, parameters)
    properties = parameters.get("properties")
    try:
        return _built(elements[0], properties.get(name) if isinstance(properties, Mapping) else None, parameters)
    except MalformedError:
        return typed(text, name, parameters)


def _built(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    """Elements as a list or an object, a text as what its schema says. Raises MalformedError for an object that has a
    name twice."""
    if isinstance(value, str):
        return typed(value, "", {**root, "properties": {"": schema}})
    schema = resolved(schema, root)
    names = {name for name, _ in value}
    if names == {"item"} and types_of(schema, root) != {"object"}:
        return [_built(item, schema.get("items"), root) for _, item in value]
    if len(names) < len(value):
        raise MalformedError
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    return {name: _built(inside, properties.get(name), root) for name, inside in value}


def allowed_types(name: str, parameters: Mapping[str, Any]) -> set[str]:
    """Names of the JSON types that the schema allows the parameter `name`; empty when it does not say."""
    properties = parameters.get("properties")
    return types_of(properties.get(name) if isinstance(properties, Mapping) else None, parameters)


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Names of the JSON types that a schema allows; empty when it does not say."""
    types: set[str] = set()
    waiting, seen = [schema], set()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))  # one may refer to itself
        kind = schema.get("type")
        if isinstance(kind, str | list):
            types |= {item for item in ([kind] if isinstance(kind, str) else kind) if isinstance(item, str)}
        elif "const" in schema:
            types |= _type_names(schema["const"])
        elif isinstance(schema.get("enum"), list):
            types |= set().union(*map(_type_names, schema["enum"]))
        elif (target := resolved(schema, root)) is not schema:
            waiting.append(target)
        else:
            choices = (schema.get(key) for key in ("anyOf", "oneOf", "allOf"))
            waiting += (each for some in choices if isinstance(some, list) for each in some)
    return types


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a schema's reference leads to, or the schema itself; nothing where it is none."""
    if not isinstance(schema, Mapping):
        return {}
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    target: Any = root
    for part in reference[2:].split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else {}


def _type_names(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    if value is None:
        return {"null"}
    return {"string"} if isinstance(value, str) else {"array"} if isinstance(value, list) else {"object"}


@dataclass(frozen=True)
class _Ends:
    """What may end a value, and what of a call may stand `behind` each of these; `end` is the one that should. A name
    stands behind `key`."""

    end: str
    key: str
    behind: Mapping[str, tuple[str, ...]]

    @cached_property
    def marks(self) -> MarkSet:
        return MarkSet((self.key, *self.behind))

    @cached_property
    def only_end(self) -> MarkSet:
        return MarkSet((self.end,))


def _read_value(reply: Reading, ends: _Ends, parameters: Mapping[str, Any]) -> Read[tuple[str, str]]:
    """The text of a value, and what ended it; both are taken. A text may be about calls: it ends where the call goes on
    or is over behind its end, or behind what comes where its end was forgotten; at the first of these if neither ever
    happens."""
    source = reply.source
    start, first = source.at, None
    marks = ends.only_end if reply.streams else ends.marks
    while True:
        try:
            _, mark = yield from source.until(marks)
            if ends.end in source.missing:
                first = source.at, mark
                raise CutShortError
        except CutShortError:
            source.missing.add(ends.end)
            if first is None or reply.is_cut:
                raise
            source.at, mark = first
            break
        at = source.at
        first = first or (at, mark)
        yield from source.skip_space()
        if mark == ends.key:
            goes_on = yield from _names_parameter(source, parameters)
        else:
            goes_on = (yield from source.take_any(ends.behind[mark])) is not None
        is_over = goes_on or not (yield from source.next_character())
        source.at = at
        if is_over:
            break
    return source.text[start : source.at - len(mark)], mark


def _names_parameter(source: Source, parameters: Mapping[str, Any]) -> Read[bool]:
    """Whether the name of a parameter comes next, and then the end of its tag, or another tag. Takes nothing."""
    properties, at = parameters.get("properties"), source.at
    try:
        written, _ = yield from source.until(_KEY_END, limit=MAX_NAME_CHARACTERS)
    except MalformedError:
        return False
    source.at = at
    found = _ATTRIBUTE.match(written)
    return isinstance(properties, Mapping) and (written if found is None else found.group(1)) in properties


@dataclass(frozen=True)
class Tags:
    """How a family writes calls. `call` and `parameter` begin a tag that goes on with a name and ends with `>`; one of
    `closing` ends a block of calls. With `has_cdata` a value may stand in a CDATA section."""

    call: str
    call_end: str
    parameter: str
    parameter_end: str
    closing: tuple[str, ...]
    has_cdata: bool = False

    @cached_property
    def ends(self) -> _Ends:
        """What a value ends with, or with what comes where its end was forgotten."""
        behind = {self.parameter_end: (self.parameter, self.call_end, *self.closing)}
        behind[self.call_end] = (*self.closing, self.call)
        behind |= {closing: (f"<{closing[2:]}",) for closing in self.closing}
        return _Ends(self.parameter_end, self.parameter, behind)


_CDATA_END = MarkSet(("]]>",))
_NAME_END = MarkSet((">", "\n"))
_KEY_END = MarkSet((">", "<", "\n"))
# A name, in quotes or not, and what DeepSeek says of the value.
_ATTRIBUTE = re.compile(r'^"?([^"\s]+)"?(?:\s+string\s*=\s*"(true|false)")?\s*"?$')


def reader(tags: Tags) -> CallReader:
    """A reader of what follows the opening mark: calls until one of `tags.closing`, or until something else comes."""

    def read(reply: Reading) -> Read[None]:
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


def read_one(tags: Tags, *, only_known: bool = False) -> CallReader:
    """A reader for when the opening mark is itself the beginning of a call's tag. With `only_known` that is what models
    forget to put a mark before, and so may be what an answer is about."""

    def read(reply: Reading) -> Read[None]:
        yield from _read_call(reply, tags, only_known=only_known)
        yield from reply.source.skip_space()
        yield from reply.source.take_any(tags.closing)

    return read


def read_glm(reply: Reading) -> Read[None]:
    """GLM: `get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>` behind `<tool_call>`.

    Tags are forgotten: a key or a value ends with whatever tag comes next. Some write JSON instead."""
    source = reply.source
    written, mark = yield from source.until(_GLM_NAME_END, limit=MAX_NAME_CHARACTERS)
    if mark == "{":
        source.at -= 1
        if written.strip():
            yield from read_arguments(reply, checked_name(written))
            yield from source.skip_space()
            yield from source.take("</tool_call>")
        else:
            yield from json_calls.reader(("</tool_call>",))(reply)
        return
    name = checked_name(written)
    parameters = reply.schemas.get(name, {})
    arguments: dict[str, Any] = {}
    while mark != "</tool_call>":
        key, end = yield from source.until(_GLM_KEY_END, limit=MAX_NAME_CHARACTERS)
        key = key.strip().removeprefix("<arg_key>")  # a model may write it twice, and what closes it
        if end == "</arg_key>":
            yield from source.skip_space()
            while (yield from source.take("</arg_key>")):
                yield from source.skip_space()
            yield from source.take("<arg_value>")
        value, end = yield from _read_value(reply, _GLM_ENDS, parameters)
        if end != "</arg_value>":
            source.at -= len(end)
            value = value.rstrip()
        arguments[key] = typed(value, key, parameters)
        yield from source.skip_space()
        following = yield from source.take_any(("<arg_key>", "</tool_call>"))
        if following is None and (reply.is_cut or (yield from source.next_character())):
            raise MalformedError
        mark = following or "</tool_call>"
    reply.call(name, arguments)


_GLM_NAME_END = MarkSet(("<arg_key>", "</tool_call>", "{"))
_GLM_KEY_END = MarkSet(("</arg_key>", "<arg_value>"))
_GLM_ENDS = _Ends(
    "</arg_value>", "<arg_key>", {"</arg_value>": ("<arg_key>", "</tool_call>"), "</tool_call>": ("<tool_call>",)}
)


def _read_call(reply: Reading, tags: Tags, *, only_known: bool = False) -> Read[None]:
    source = reply.source
    name, _ = yield from _read_name(reply)
    name = checked_name(name)
    if only_known and name not in reply.schemas:
        raise MalformedError
    parameters = reply.schemas.get(name, {})
    arguments: dict[str, Any] = {}
    while True:
        yield from source.skip_space()
        if (yield from source.take(tags.parameter)):
            key, is_text = yield from _read_name(reply)
            if tags.has_cdata and (yield from source.take("<![CDATA[")):
                value, _ = yield from source.until(_CDATA_END)
                yield from source.take(tags.parameter_end)
            else:
                text, mark = yield from _read_value(reply, tags.ends, parameters)
                if mark != tags.parameter_end:  # a closing tag forgotten: the value ends where the next thing begins
                    source.at -= len(mark)
                # The line breaks that the tags stand on are not the value's.
                value = text.removeprefix("\n").removesuffix("\n")
            if is_text is None:
                arguments[key] = typed(value, key, parameters)
            else:
                arguments[key] = value if is_text else parse_json(value)
        elif (yield from source.take(tags.call_end)) or (yield from _ends_without_tag(reply, tags)):
            break
        else:
            raise MalformedError
    reply.call(name, arguments)


def _ends_without_tag(reply: Reading, tags: Tags) -> Read[bool]:
    """Whether a call whose closing tag was forgotten is over. Takes nothing."""
    source = reply.source
    at = source.at
    closing = yield from source.take_any(tags.closing)
    source.at = at
    return closing is not None or not (reply.is_cut or (yield from source.next_character()))


def _read_name(reply: Reading) -> Read[tuple[str, bool | None]]:
    """A tag's name up to its end, and what it says of the value being a text, if anything."""
    written, mark = yield from reply.source.until(_NAME_END, limit=MAX_NAME_CHARACTERS)
    found = _ATTRIBUTE.match(written.strip())
    if mark == "\n" or found is None:
        raise MalformedError
    return found.group(1), None if found.group(2) is None else found.group(2) == "true"
