"""Calls written as Python: `[get_weather(city="Paris", days=3), get_time()]`.

Llama 3.2 and 4, LFM2 and others; and what Llama 3 writes behind `<|python_tag|>`: a JSON call, a call of a built-in
tool, or code. Literals only; nothing is ever evaluated.
Pure. Does not: know the marks (`formats.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from localrun.server.parsing import json_calls
from localrun.server.parsing.json_calls import checked_name
from localrun.server.parsing.source import CallReader, CutShortError, MalformedError, Read, Reading

_CLOSING = {"(": ")", "[": "]", "{": "}"}
_JSON_WORDS = {"true": True, "false": False, "null": None}
MAX_DEPTH = 100
MAX_CHARACTERS = 1_000_000
# Enough to tell by its beginning whether a text can be a call.
_HEAD_CHARACTERS = 512


def reader(closing: tuple[str, ...], *, only_known: bool = False, on_lines: bool = False) -> CallReader:
    """A reader of a list of calls, or of one call, or `on_lines` of any number, and then one of `closing`. `only_known`
    refuses, as early as it can be told, what is no call of a known tool."""

    def read(reply: Reading) -> Read[None]:
        source = reply.source
        yield from source.skip_space()
        is_over = False
        while not is_over:
            text = yield from _read_expression(reply, reply.schemas if only_known else None)
            for name, arguments in parse_calls(text, reply.schemas):
                if only_known and name not in reply.schemas:
                    raise MalformedError
                reply.call(name, arguments)
            source.commit()
            yield from source.skip_space()
            closed = yield from source.take_any(closing)
            is_over = closed is not None or not on_lines or not (yield from source.next_character())

    return read


def parse_calls(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The (name, arguments) of each call. Arguments without a name get those of the schema's properties, in order.

    Raises MalformedError.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise MalformedError from None
    calls = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
    if not calls:
        raise MalformedError
    return [_call(call, schemas) for call in calls]


def _call(node: ast.expr, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise MalformedError
    name = checked_name(ast.unparse(node.func))
    properties = schemas.get(name, {}).get("properties")
    order = list(properties) if isinstance(properties, Mapping) else []
    if len(node.args) > len(order):
        raise MalformedError
    arguments = {key: _literal(value) for key, value in zip(order, node.args, strict=False)}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise MalformedError
        arguments[keyword.arg] = _literal(keyword.value)
    return name, arguments


def _literal(node: ast.expr) -> Any:
    """A value of JSON's types. Raises MalformedError for anything that would have to be evaluated."""
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # pairs, as JSON has them
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float, type(None))):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise MalformedError
        return dict(zip(keys, (_literal(value) for value in node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value
    raise MalformedError


def _read_expression(reply: Reading, known: Mapping[str, Any] | None) -> Read[str]:
    """The text up to where the first bracket is closed again, taken; of a list that the reply's limit cut off, the
    calls that are whole. Raises MalformedError."""
    source = reply.source
    start, closers, quote = source.at, [], ""
    whole_calls = ""
    while source.at - start < MAX_CHARACTERS:
        if source.at >= len(source.text):
            if known is not None and not _may_be_call(source.text[start : start + _HEAD_CHARACTERS], known):
                raise MalformedError
            if not (yield from source.wait()):
                if reply.is_cut and whole_calls:
                    return f"{whole_calls}]"
                raise CutShortError
            continue
        character = source.text[source.at]
        if quote:
            if character == "\\":
                if source.at + 1 >= len(source.text) and (yield from source.wait()):
                    continue
                source.at += 1
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in _CLOSING:
            closers.append(_CLOSING[character])
            if len(closers) > MAX_DEPTH:
                raise MalformedError
        elif closers and character == closers[-1]:
            closers.pop()
            if closers == ["]"] and character == ")":
                whole_calls = source.text[start : source.at + 1]
            if not closers:
                if known is not None and not _may_be_call(source.text[start : start + _HEAD_CHARACTERS], known):
                    raise MalformedError
                source.at += 1
                return source.text[start : source.at]
        elif character in ")]}" or (not closers and not (character.isidentifier() or character in ".0123456789 ")):
            raise MalformedError
        source.at += 1
    raise MalformedError


def _may_be_call(text: str, known: Mapping[str, Any]) -> bool:
    """Whether a text that begins so can be a call of a known tool, or a list of them."""
    rest = text.removeprefix("[").lstrip()
    return any(f"{name}(".startswith(rest) or rest.startswith(f"{name}(") for name in known)


# What clients call the tool that runs code.
_CODE_TOOLS = ("python", "code_interpreter", "ipython")


def read_python_tag(reply: Reading) -> Read[None]:
    """`{"name": ...}`, `brave_search.call(query="...")`, or the code for a tool that takes code."""
    source = reply.source
    yield from source.skip_space()
    start = source.at
    if (yield from source.next_character()) == "{":
        yield from json_calls.reader(())(reply)
        return
    while (yield from source.wait()):
        pass
    text = source.text[start:]
    code_tool = next((name for name in _CODE_TOOLS if name in reply.schemas), None)
    try:
        calls = parse_calls(text.strip(), reply.schemas)
    except MalformedError:
        calls = []
    if calls and (code_tool is None or all(name.removesuffix(".call") in reply.schemas for name, _ in calls)):
        for name, arguments in calls:
            reply.call(name.removesuffix(".call"), arguments)
    elif code_tool is not None and not reply.is_cut:
        reply.call(code_tool, {"code": text})
    else:
        raise MalformedError
    source.at = len(source.text)
