"""What the decoding of a reply is held to: tool calls that must come, calls that may, an answer of a given form.

A grammar begins where the reply does, or right behind a text that the reply comes to (a trigger). Where thinking may
stand before, either the prompt has opened it, and its closing tag is the trigger, or the grammar has room for it.

A conversation brings the same tools with every turn, so the grammars of calls are remembered.

Where arguments are written one by one (`Listed`), a value between texts is bare text where its schema allows texts, and
JSON otherwise. Bare text is held to the schema's constants alone. Which one it is must be told as the readers tell it
(`types_of`).

Pure but for that; any thread may call. Does not: compile a grammar.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from localrun.errors import BadRequest
from localrun.server import notices, structured
from localrun.server.parsing.parser import ThinkingTags
from localrun.server.parsing.pieces import dump_json
from localrun.server.parsing.written import NAME, Listed, Written
from localrun.server.parsing.xml_calls import types_of
from localrun.server.prompting.ask import Tool
from localrun.server.structured.schema import checked
from localrun.wire import Grammar, GrammarKind

_Made = TypeVar("_Made", Grammar, Grammar | None)

# Between the end of the thinking and what must follow it.
_SPACE_RULE = r"space: /[ \n]{0,4}/"
_ANY_OBJECT = {"type": "object"}
_MAX_REMEMBERED = 32


def _remembered(make: Callable[..., _Made]) -> Callable[..., _Made]:
    """`make(written, tools, *, is_one, control_tokens)`, its last results kept by a digest: tools may be megabytes,
    grammars not."""
    known: OrderedDict[bytes, tuple[_Made, list[str]]] = OrderedDict()
    lock = threading.Lock()

    def look_up(written: Written, tools: Sequence[Tool], *, is_one: bool, control_tokens: Sequence[str] = ()) -> _Made:
        listed = written.arguments
        texts = () if listed is None else (listed.before, listed.quote or "", listed.after, written.after)
        controls = [token for token in control_tokens if token and any(token in text for text in texts)]
        digest = hashlib.sha256(msgspec.json.encode((written, tools, is_one, controls))).digest()
        with lock:
            found = known.get(digest)
            if found is not None:
                known.move_to_end(digest)
        if found is None:
            with notices.collected() as noted:
                found = make(written, tools, is_one=is_one, control_tokens=controls), noted
            with lock:
                known[digest] = found
                if len(known) > _MAX_REMEMBERED:
                    known.popitem(last=False)
        notices.note(*found[1])
        return found[0]

    return look_up


@_remembered
def forced_calls(
    written: Written, tools: Sequence[Tool], *, is_one: bool, control_tokens: Sequence[str] = ()
) -> Grammar:
    """The whole reply is calls, one at least. Raises BadRequest for a schema that no decoding can be held to."""
    return structured.calls(
        _shapes(written, tools, control_tokens, is_checked=True),
        is_one=is_one or written.separator is None,
        separator=written.separator or "",
        before=written.opening + written.lead,
        after=written.closing,
    )


@_remembered
def lazy_calls(
    written: Written, tools: Sequence[Tool], *, is_one: bool, control_tokens: Sequence[str] = ()
) -> Grammar | None:
    """The reply is free until it opens a call, and then well-formed calls. None where an opening cannot be told.

    A tool whose schema no decoding can be held to gets any object for its arguments: its calls are still JSON. So do
    all of them when together they are too much; None when their names alone are.
    """
    if not written.triggers:
        return None
    free = [msgspec.structs.replace(tool, parameters=_ANY_OBJECT) for tool in tools]
    for wanted in (tools, free):
        with contextlib.suppress(BadRequest):
            grammar = structured.calls(
                _shapes(written, wanted, control_tokens, is_checked=False),
                is_one=is_one or written.separator is None,
                separator=written.separator or "",
                before=written.lead,
                after=written.closing,
                triggers=written.triggers,
            )
            return msgspec.structs.replace(grammar, has_mentions=True)
    return None


def calls_or_answer(
    written: Written, tools: Sequence[Tool], answer: Grammar, *, is_one: bool, control_tokens: Sequence[str] = ()
) -> Grammar:
    """Either calls or the answer, from the beginning of the reply. Raises BadRequest for an answer that is no JSON
    schema."""
    if answer.kind is not GrammarKind.JSON_SCHEMA:
        raise BadRequest.of(
            "tools", "only a JSON schema can be combined with tools; leave the tools or the grammar out"
        )
    if not written.opening and written.before.startswith("{"):
        return _objects_or_answer(tools, answer)
    calls = _renamed(forced_calls(written, tools, is_one=is_one, control_tokens=control_tokens), "calls")
    return Grammar(GrammarKind.LARK, f"{calls}\nanswer: %json {answer.text}\nstart: calls | answer\n")


def after_thinking(
    grammar: Grammar,
    tags: ThinkingTags,
    *,
    is_open: bool,
    may_think: bool,
    must_come: bool = False,
    control_tokens: Sequence[str] = (),
) -> Grammar:
    """A grammar for the whole reply, as one for what follows the thinking. A reply that `must_come` cannot end inside
    of thinking that the prompt has opened."""
    if grammar.triggers or not (is_open or may_think):
        return grammar
    triggers = (tags.closing,) if is_open else ()
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        body = f"reply: %json {grammar.text}"
    elif grammar.kind is GrammarKind.LARK:
        body = _renamed(grammar, "reply")
    else:  # its notation has no room for more: the model answers without thinking, or right behind it
        return msgspec.structs.replace(grammar, triggers=triggers)
    if is_open and not (must_come and grammar.kind is GrammarKind.LARK):
        return Grammar(GrammarKind.LARK, f"{body}\nstart: space reply\n{_SPACE_RULE}\n", triggers)
    if tags.closing in control_tokens:
        closing = json.dumps(tags.closing, ensure_ascii=False)
        rules = [f"literal_901: {closing}", "thoughts: /(?s:.*)/", "thinking: thoughts literal_901 space"]
    else:
        end = re.escape(tags.closing).replace("/", r"\/")
        rules = [f"thoughts[lazy]: /(?s:.*){end}/", "thinking: thoughts space"]
    if is_open:
        rules.append("start: thinking reply")
    else:
        opening = json.dumps(tags.opening, ensure_ascii=False)
        rules += [f"literal_900: {opening}", "start: (literal_900 thinking)? reply"]
    return Grammar(GrammarKind.LARK, "\n".join((body, *rules, _SPACE_RULE)) + "\n")


def _objects_or_answer(tools: Sequence[Tool], answer: Grammar) -> Grammar:
    """Where calls are bare objects, an answer may begin like one: all of them are one schema then."""
    schema = json.loads(answer.text)
    definitions = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
    choices: list[Any] = []
    for tool in tools:
        arguments = _arguments(tool, is_checked=False)
        if "$ref" in json.dumps(arguments):
            arguments = _ANY_OBJECT
        choices.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "parameters": arguments},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    combined = json.dumps({"anyOf": [*choices, schema], **definitions}, ensure_ascii=False)
    structured.check_size(len(combined))
    return Grammar(GrammarKind.JSON_SCHEMA, combined)


def _shapes(
    written: Written, tools: Sequence[Tool], control_tokens: Sequence[str], *, is_checked: bool
) -> list[structured.CallShape]:
    shapes = []
    written = _with_gaps_before(written)
    for tool in tools:
        before = written.before.replace(NAME, tool.name)
        schema = _arguments(tool, is_checked=is_checked)
        listed, separator = None, ""
        if written.arguments is not None:
            listed = argument_shapes(
                written.arguments,
                checked(schema, field=tool.field),
                ends=(written.after, written.closing),
                field=tool.field,
                control_tokens=control_tokens,
            )
            separator = written.arguments.separator
        is_strict = tool.is_strict and is_checked
        shapes.append(
            structured.CallShape(before, schema, written.after, tool.field, tool.name, listed, separator, is_strict)
        )
    return shapes


def _with_gaps_before(written: Written) -> Written:
    """The same, with the white space behind an argument in front of what follows it, if it stands before the first one
    as well: where a text ends is told by a single literal."""
    listed = written.arguments
    if listed is None or listed.separator:
        return written
    after = listed.after.rstrip()
    gap = listed.after[len(after) :]
    if not written.before.endswith(gap):
        return written
    before_text = listed.before_text and gap + listed.before_text
    listed = replace(listed, before=gap + listed.before, after=after, before_text=before_text)
    return replace(written, before=written.before.removesuffix(gap), arguments=listed, after=gap + written.after)


def _arguments(tool: Tool, *, is_checked: bool) -> dict[str, Any]:
    """The schema of a call's arguments, which are always an object: parsers take no other value for a call.

    Where no decoding can be held to it, BadRequest if it `is_checked`, else any object.
    """
    schema = {**_ANY_OBJECT, **tool.parameters}
    try:
        structured.json_schema(schema, field=tool.field, strict=tool.is_strict and is_checked)
        if "object" not in (schema["type"] if isinstance(schema["type"], list) else [schema["type"]]):
            raise BadRequest(f"{tool.field}.type: must be object, because arguments have names", field=tool.field)
    except BadRequest:
        if is_checked:
            raise
        return _ANY_OBJECT
    return schema | _ANY_OBJECT


def _renamed(grammar: Grammar, name: str) -> str:
    """A lark grammar whose `start` is called `name`."""
    lines = grammar.text.splitlines()
    return "\n".join(f"{name}:{line.removeprefix('start:')}" if line.startswith("start:") else line for line in lines)


# Alternatives and references deeper than that are nobody's arguments.
_MAX_DEPTH = 8
_NOT_OF_BARE_TEXT = ("minLength", "maxLength", "pattern", "format")


def argument_shapes(
    listed: Listed, parameters: Mapping[str, Any], *, ends: tuple[str, str], field: str, control_tokens: Sequence[str]
) -> tuple[structured.ArgumentShape, ...]:
    """The arguments of a tool, in the order of its schema; last one whose name is the model's own, where the schema
    allows any. `ends` are what follows them all and, where models forget that, comes next. `parameters` were checked at
    `field`."""
    properties: dict[str, Any] = {}
    required = dict.fromkeys(_gather(parameters, parameters, properties, 0))
    for name in required:
        properties.setdefault(name, {})
    is_told = ends[0].strip() and not (listed.quote or listed.separator or listed.after[-1:].isspace())
    has_controls = any(token in text for token in control_tokens for text in (listed.before, *ends))
    told_by = tuple(filter(None, map(str.strip, ends))) if is_told and not has_controls else ()
    shapes = [
        _shape(listed, name, schema, parameters, field, told_by, control_tokens, is_required=name in required)
        for name, schema in properties.items()
        if schema is not False
    ]
    others = parameters.get("additionalProperties", not properties and "properties" not in parameters)
    if others is not False and NAME not in listed.after:
        schema = others if isinstance(others, dict) else {}
        shapes.append(_shape(listed, "", schema, parameters, field, told_by, control_tokens, is_required=False))
    return tuple(shapes)


def _gather(schema: Any, root: Mapping[str, Any], properties: dict[str, Any], depth: int) -> Iterator[str]:
    """Collects the properties that an object may have, and gives those that it must have."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    own = schema.get("properties")
    if isinstance(own, Mapping):
        for name, described in own.items():
            properties.setdefault(name, described)
    required = schema.get("required")
    yield from (name for name in (required if isinstance(required, list) else ()) if isinstance(name, str))
    yield from _gather(_target(schema.get("$ref"), root), root, properties, depth + 1)
    for part in schema.get("allOf") or ():
        yield from _gather(part, root, properties, depth + 1)
    for alternatives in (schema.get("anyOf") or (), schema.get("oneOf") or ()):
        each = [set(_gather(part, root, properties, depth + 1)) for part in alternatives]
        yield from sorted(set.intersection(*each)) if each else ()


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target: Any = root
    for part in filter(None, reference[1:].split("/")):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target


def _shape(
    listed: Listed,
    name: str,
    schema: Any,
    root: Mapping[str, Any],
    field: str,
    ends: tuple[str, ...],
    control_tokens: Sequence[str],
    *,
    is_required: bool,
) -> structured.ArgumentShape:
    path = f"properties.{name}" if name else "additionalProperties"
    allowed = types_of(schema, root)
    is_text = listed.quote is not None and (not allowed or "string" in allowed)
    before, after = listed.texts_round(is_text=is_text)
    after = after.replace(NAME, name)
    named = (before.replace(NAME, name),) if name else tuple(before.split(NAME))
    if not is_text:
        value = _alone(schema, root, allowed, f"{field}.{path}")
        return structured.ArgumentShape(named, after, value, is_required=is_required, path=path)
    texts = _constants(schema)
    if texts:
        return structured.ArgumentShape(named, after, texts=texts, is_required=is_required, path=path)
    for keyword in _NOT_OF_BARE_TEXT:
        if isinstance(schema, Mapping) and keyword in schema:
            notices.note(f"{field}.{path}.{keyword}: this model writes texts bare, and those cannot be held to it")
    until = listed.quote or after.strip()
    controls = [token for token in control_tokens if token and token in until]
    return structured.ArgumentShape(
        named,
        after[after.index(until) + len(until) :],
        until=until,
        ends=ends,
        another=listed.before.partition(NAME)[0].strip(),
        control=min(controls, key=until.index, default=""),
        is_required=is_required,
        path=path,
    )


def _alone(schema: Any, root: Mapping[str, Any], allowed: set[str], field: str) -> dict[str, Any]:
    """The schema of one value by itself; what it refers to elsewhere than in the definitions is left out."""
    made = dict(schema) if isinstance(schema, Mapping) else {}
    if '"$ref"' in dump_json(made):
        made |= {key: root[key] for key in ("$defs", "definitions") if key in root}
    try:
        structured.json_schema(made, field=field, strict=False)
    except BadRequest:
        return {"type": sorted(allowed)} if allowed else {}
    return made


def _constants(schema: Any) -> tuple[str, ...]:
    """The texts that a bare value may be, if its schema lists them."""
    if not isinstance(schema, Mapping):
        return ()
    values = [schema["const"]] if "const" in schema else schema.get("enum") or ()
    return tuple(value if isinstance(value, str) else dump_json(value) for value in values)
