"""Calls that are written neither as JSON nor in tags: as Python, and as Gemma writes them.

`[get_weather(city="Paris", days=3), get_time()]` is of Llama 3.2 and 4, LFM2 and others; so is what Llama 3 writes
behind `<|python_tag|>`: a JSON call, a call of a built-in tool, or code. Literals only; nothing is ever evaluated.
Names may be those that Python does not take (`dry-run`, `from`), and texts may have line breaks. LFM2 may be told to
write its calls as JSON.

`call:get_weather{city:<|"|>Paris<|"|>,days:3}` is Gemma's, between two marks: like JSON, with keys unquoted and a token
of its own for quotes, within which nothing is escaped. No grammar holds the model to it unless a call must come, so
what it slips on is mended where its meaning is plain: a text in other quotes or in none, quotes, braces or marks that
are not closed at the end, a comma left out, names of a server before the tool's, and brackets as Python has them.

Pure. Does not: know the marks (`formats.py`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from localrun.server.parsing import json_calls
from localrun.server.parsing.json_calls import checked_name, parse_json
from localrun.server.parsing.source import CallReader, CutShortError, MalformedError, MarkSet, Read, Reading
from localrun.server.parsing.xml_calls import allowed_types

MAX_DEPTH = 100

# --- Python ---

_CLOSING = {"(": ")", "[": "]", "{": "}"}
_JSON_WORDS = {"true": True, "false": False, "null": None}
MAX_CHARACTERS = 1_000_000
# A text, or the name of a tool or of an argument.
_TEXT_OR_NAME = re.compile(
    r"""('{3}.*?'{3}|"{3}.*?"{3}|'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")|(?<![\w$@.:/-])[\w$@.:/-]++(?=\s*+[=(])""",
    re.DOTALL,
)
# An escape, or what has to be one.
_IN_TEXT = re.compile(r"\\(?:[\\'\"abfnrtv0-7]|x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8})|[\\\r\n]")
_ESCAPES = {"\\": r"\\", "\n": r"\n", "\r": r"\r"}
# Besides letters, and the blank behind a name.
_IN_NAMES = "0123456789.:/$@- "
# Enough to tell by its beginning whether a text can be a call.
_HEAD_CHARACTERS = 512


def python_reader(closing: tuple[str, ...], *, only_known: bool = False, on_lines: bool = False) -> CallReader:
    """A reader of a list of calls, or of one call, or `on_lines` of any number, and then one of `closing`. `only_known`
    refuses, as early as it can be told, what is no call of a known tool."""

    def read(reply: Reading) -> Read[None]:
        source = reply.source
        yield from source.skip_space()
        start = source.at
        yield from source.take("[")
        yield from source.skip_space()
        is_json = not only_known and (yield from source.next_character()) == "{"
        source.at = start
        if is_json:
            yield from json_calls.reader(closing)(reply)
            return
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
    names: dict[str, str] = {}

    def plain(found: re.Match[str]) -> str:
        """A text on one line, and a name as one that Python takes."""
        if found.group(1) is None:
            names[made := f"_{len(names)}"] = found.group()
            return made
        return _IN_TEXT.sub(lambda odd: _ESCAPES.get(odd.group(), odd.group()), found.group())

    try:
        tree = ast.parse(_TEXT_OR_NAME.sub(plain, text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise MalformedError from None
    calls = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
    if not calls:
        raise MalformedError
    return [_call(call, schemas, names) for call in calls]


def _call(
    node: ast.expr, schemas: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]
) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise MalformedError
    name = checked_name(names.get(ast.unparse(node.func), ""))
    properties = schemas.get(name, {}).get("properties")
    order = list(properties) if isinstance(properties, Mapping) else []
    if len(node.args) > len(order):
        raise MalformedError
    arguments = {key: _literal(value) for key, value in zip(order, node.args, strict=False)}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise MalformedError
        arguments[names.get(keyword.arg, keyword.arg)] = _literal(keyword.value)
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
        elif character in ")]}" or (not closers and not (character.isidentifier() or character in _IN_NAMES)):
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


# --- Gemma's ---

_HEAD = re.compile(r"\s*(?:call)?:([^{(]*)(?=[{(])")
_BARE = re.compile(r"[^,{}\[\]]+")
_SPACE = re.compile(r"\s*")
# What a text without quotes ends before: the next key, or the end of the call.
_BARE_TEXT_END = re.compile(r",\s*[\w.-]+\s*:|\}?\Z")
_SINGLE_QUOTE_END = re.compile(r"'(?=\s*(?:[,}\]]|\Z))")


def gemma_reader(opening: str, closing: str, quote: str) -> CallReader:
    ends = MarkSet((closing, opening))

    def read(reply: Reading) -> Read[None]:
        source = reply.source
        start = source.at
        try:
            text, mark = yield from source.until(ends)
        except CutShortError:
            if reply.is_cut:
                raise
            text, mark = source.text[start:], ""
            source.at = len(source.text)
        if mark == opening:
            source.at -= len(mark)
        head = _HEAD.match(text)
        if head is None:
            raise MalformedError
        name, text = checked_name(head.group(1)), text.rstrip()
        known = name.rpartition(":")[2]
        name = known if known in reply.schemas else name
        if text[head.end()] == "(":
            text = f"{text[: head.end()]}{{{text[head.end() + 1 :].removesuffix(')')}}}"
        parameters = reply.schemas.get(name, {})
        reply.call(name, _arguments(text, head.end(), quote, parameters, is_closed=bool(mark)))

    return read


def _arguments(text: str, at: int, quote: str, parameters: Mapping[str, Any], *, is_closed: bool) -> dict[str, Any]:
    """The arguments that begin at `at` and go on to the end; slips are mended where that `is_closed`. Raises
    MalformedError."""
    scans = (_Scan(text, quote), *((_Mending(text, quote, parameters),) if is_closed else ()))
    for scan in scans:
        try:
            value, end = scan.value(at, 0)
        except MalformedError:
            continue
        if isinstance(value, dict) and end == len(text):
            return value
    raise MalformedError


class _Scan:
    """The values of a text, by the rules. Each method takes where a value begins, gives it with where it ends, and
    raises MalformedError."""

    def __init__(self, text: str, quote: str, separators: str = ":") -> None:
        self.text = text
        self._quote = quote
        self._key = re.compile(rf"\s*(\"|{re.escape(quote)})?([^:{{}}\[\],\"]+?)(?(1)\1)\s*[{separators}]")

    def value(self, at: int, depth: int, key: str = "") -> tuple[Any, int]:
        at = self.after_space(at)
        if depth > MAX_DEPTH:
            raise MalformedError
        if self.text.startswith(self._quote, at):
            end = self.text.find(self._quote, at + len(self._quote))
            return (
                self.unclosed(at, depth)
                if end < 0
                else (self.text[at + len(self._quote) : end], end + len(self._quote))
            )
        character = self.text[at : at + 1]
        if character == "{":
            return self._object(at + 1, depth)
        if character == "[":
            return self._list(at + 1, depth)
        if character == '"':
            return self._quoted(at)
        return self.bare(at, depth, key)

    def bare(self, at: int, depth: int, key: str) -> tuple[Any, int]:
        found = _BARE.match(self.text, at)
        if found is None:
            raise MalformedError
        return parse_json(found.group()), found.end()

    def unclosed(self, at: int, depth: int) -> tuple[Any, int]:
        raise MalformedError

    def is_at_end(self, at: int, closing: str) -> bool:
        return self.text.startswith(closing, at)

    def after_space(self, at: int) -> int:
        found = _SPACE.match(self.text, at)
        assert found is not None
        return found.end()

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = self.after_space(at)
        while not self.is_at_end(at, "}"):
            key = self._key.match(self.text, at)
            if key is None:
                raise MalformedError
            found[key.group(2)], at = self.value(key.end(), depth + 1, key.group(2))
            at = self._after_separator(at, "}")
        return found, min(at + 1, len(self.text))

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        found = []
        at = self.after_space(at)
        while not self.is_at_end(at, "]"):
            value, at = self.value(at, depth + 1)
            found.append(value)
            at = self._after_separator(at, "]")
        return found, min(at + 1, len(self.text))

    def _quoted(self, at: int) -> tuple[str, int]:
        end = at + 1
        while (end := self.text.find('"', end)) >= 0:
            if not _is_escaped(self.text, end):
                return str(parse_json(self.text[at : end + 1])), end + 1
            end += 1
        raise MalformedError

    def _after_separator(self, at: int, closing: str) -> int:
        at = self.after_space(at)
        if self.text.startswith(",", at):
            return self.after_space(at + 1)
        if not self.is_at_end(at, closing):
            raise MalformedError
        return at


class _Mending(_Scan):
    """The same of a text with slips."""

    def __init__(self, text: str, quote: str, parameters: Mapping[str, Any]) -> None:
        super().__init__(text, quote, ":=")
        self._parameters = parameters

    def bare(self, at: int, depth: int, key: str) -> tuple[Any, int]:
        if self.text.startswith("'", at):
            found = _SINGLE_QUOTE_END.search(self.text, at + 1)
            if found is not None:
                return self.text[at + 1 : found.start()], found.end()
        allowed = allowed_types(key, self._parameters)
        end = _BARE_TEXT_END.search(self.text, at)
        if depth != 1 or end is None or (allowed and "string" not in allowed):
            return super().bare(at, depth, key)
        text = self.text[at : end.start()].rstrip()
        if allowed != {"string"}:
            try:
                return parse_json(text), end.start()
            except MalformedError:
                pass
        return text, end.start()

    def unclosed(self, at: int, depth: int) -> tuple[Any, int]:
        """A text whose quote is not closed goes on to the brackets that close what it stands in."""
        end = len(self.text)
        for _ in range(depth):
            end = len(self.text[:end].rstrip())
            end -= self.text[end - 1 : end] in ("}", "]")
        return self.text[at + len(self._quote) : end], end

    def _after_separator(self, at: int, closing: str) -> int:
        is_key = closing == "}" and self._key.match(self.text, at)
        return self.after_space(at) if is_key else super()._after_separator(at, closing)

    def is_at_end(self, at: int, closing: str) -> bool:
        return at >= len(self.text) or super().is_at_end(at, closing)


def _is_escaped(text: str, at: int) -> bool:
    n_backslashes = 0
    while text[at - 1 - n_backslashes] == "\\":
        n_backslashes += 1
    return n_backslashes % 2 == 1
