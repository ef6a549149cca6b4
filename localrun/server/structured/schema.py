"""Which JSON schemas an answer can be held to. A keyword is enforced, known to enforce nothing, or refused by name.

What passes is copied without annotations, so that schemas that mean the same are compiled once. References lead
somewhere, and not only to themselves; recursion through an array or an object is fine, since the answer decides how
deep it goes.

Objects that list their properties get no others, unless the schema says so. JSON schema lets an object have any further
property when `additionalProperties` is left out. Hardly anybody means that, and a small model that may invent keys does
so without end. An answer without them matches the schema as well. Where a value is described by two schemas at once
(`allOf`, `$ref` beside `properties`) each knows only its own properties; such a schema is left as it is.

Pure. Does not: compile, and so not see what only that shows (a pattern that is no regular expression, alternatives of
`oneOf` that overlap); the engine refuses these.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from localrun.errors import BadRequest

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 5_000
# Through references as well, which are compiled by recursion: 2,000 to 3,000 of these levels overflow the stack.
MAX_REFERENCED_DEPTH = 600
# Of one object: where they may all be left out, the beginning of a name costs time by their number (3,000: 30 ms).
MAX_PROPERTIES = 1_000
MAX_ENUM_VALUES = 10_000
MAX_PATTERN_CHARACTERS = 2_000
# Lengths, and numbers of items or properties.
MAX_COUNT = 1_000_000
# The automaton for a divisor has as many states as the divisor: a million of them took 2.3 s.
MAX_DIVISOR = 10_000

# What printers of JSON put between two values, and not all that JSON allows: a model that likes spaces never finishes.
_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,20}"}

# What a regular expression means by itself is not looked for: escaped characters, and those between brackets.
_PLAIN_IN_PATTERN = re.compile(r"\\[^1-9k]|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_NOT_IN_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9k]")

FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
# Say something about a value, but hold it to nothing.
ANNOTATIONS = frozenset(
    {
        *("$comment", "$schema", "$anchor", "title", "description", "default", "examples", "example", "deprecated"),
        *("readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema"),
    }
)
_WAYS_OUT = {
    "additionalItems": "; use prefixItems and items",
    "definitions": "",
    "nullable": '; use "type": [..., "null"]',
    "not": "",
    "dependencies": "; use anyOf",
    "if": "; use anyOf",
}


def schema_text(schema: Any, *, field: str, one_of_is_any_of: bool = False) -> str:
    """The text for the engine of a schema that was `checked`. With `one_of_is_any_of` the alternatives of `oneOf` may
    overlap, which otherwise only the engine sees and refuses."""
    options = {**_OPTIONS, "coerce_one_of": True} if one_of_is_any_of else _OPTIONS
    try:
        whole = {"x-guidance": options, **checked(schema, field=field)}
        return json.dumps(whole, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise BadRequest(f"{field} has a number that JSON has not: {error}", field=field) from error
    except RecursionError as error:
        raise BadRequest(f"{field} has a value that is nested too deeply", field=field) from error


def checked(schema: Any, *, field: str) -> dict[str, Any]:
    """A copy of `schema` that only has keywords that are enforced. Raises BadRequest naming the first keyword that
    cannot be, and its path below `field`."""
    if not isinstance(schema, dict):
        raise BadRequest(f"{field} must be a JSON schema, which is an object", field=field)
    walk = _Walk(field)
    root = walk.schema(schema, field, depth=0)
    check_refs(root, field=field)
    closed: dict[str, Any] = close_objects(root)
    return closed


class _Walk:
    """One pass over a schema."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._n_subschemas = 0

    def schema(self, schema: Any, path: str, *, depth: int) -> Any:
        """A checked copy of one schema, which may be true or false."""
        self._n_subschemas += 1
        if self._n_subschemas > MAX_SUBSCHEMAS:
            raise self._refusal(path, f"the schema has more than {MAX_SUBSCHEMAS} parts")
        if depth > MAX_DEPTH:
            raise self._refusal(path, f"the schema is nested deeper than {MAX_DEPTH} levels")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self._refusal(path, "must be a schema: an object, true or false")
        copy: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
                continue
            if keyword == "$id" and depth == 0:
                continue
            copy[keyword] = self._keyword(keyword, value, path, depth + 1)
        return copy

    def _keyword(self, keyword: str, value: Any, path: str, depth: int) -> Any:
        below = f"{path}.{keyword}"
        if keyword in _SCHEMA:
            if isinstance(value, list):
                raise self._refusal(below, "must be one schema; for a list of them use prefixItems")
            return self.schema(value, below, depth=depth)
        if keyword in _SCHEMAS:
            if not isinstance(value, list) or not value:
                raise self._refusal(below, "must be a list of schemas")
            return [self.schema(item, f"{below}[{index}]", depth=depth) for index, item in enumerate(value)]
        if keyword in _NAMED_SCHEMAS:
            if not isinstance(value, dict):
                raise self._refusal(below, "must be an object of schemas")
            if keyword == "properties":
                self._check(len(value) <= MAX_PROPERTIES, below, f"an object may list {MAX_PROPERTIES} properties")
            if keyword == "patternProperties":
                for pattern in value:
                    self._check(_is_pattern(pattern), below, f"{pattern[:40]!r} {_PATTERN}")
            return {name: self.schema(item, f"{below}.{name}", depth=depth) for name, item in value.items()}
        if keyword not in _VALUES:
            way_out = _WAYS_OUT.get(keyword, "")
            raise self._refusal(path, f"the keyword {keyword!r} is not supported{way_out}")
        is_valid, wanted = _VALUES[keyword]
        self._check(is_valid(value), below, wanted)
        return value

    def _check(self, is_valid: bool, path: str, wanted: str) -> None:
        if not is_valid:
            raise self._refusal(path, wanted)

    def _refusal(self, path: str, message: str) -> BadRequest:
        return BadRequest(f"{path}: {message}", field=self._field)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= MAX_COUNT and value == int(value)


def _is_pattern(value: Any) -> bool:
    if not isinstance(value, str) or len(value) > MAX_PATTERN_CHARACTERS:
        return False
    return not _NOT_IN_PATTERN.search(_PLAIN_IN_PATTERN.sub("", value))


def _is_divisor(value: Any) -> bool:
    """The divisor's digits without the point, as the automaton sees it."""
    if not _is_number(value) or not 1e-9 <= value <= 1e9:
        return False
    digits = f"{value:.12f}".replace(".", "").strip("0")
    return int(digits) <= MAX_DIVISOR


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_COUNT = (_is_count, f"must be a whole number from 0 to {MAX_COUNT}")
_NUMBER = (_is_number, "must be a number")
_PATTERN = (
    f"must be a regular expression of at most {MAX_PATTERN_CHARACTERS} characters, without look-around or "
    f"backreferences"
)

_SCHEMA = frozenset({"items", "additionalProperties"})
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "$ref": (lambda value: isinstance(value, str), "must be a text"),
    "const": (lambda value: True, ""),
    "enum": (
        lambda value: isinstance(value, list) and 0 < len(value) <= MAX_ENUM_VALUES,
        f"must be a list of 1 to {MAX_ENUM_VALUES} values",
    ),
    "type": (_is_type, f"must be one or more of {', '.join(TYPES)}"),
    "required": (_is_names, "must be a list of names"),
    "pattern": (_is_pattern, _PATTERN),
    "format": (lambda value: value in FORMATS, f"the formats that can be enforced are {', '.join(FORMATS)}"),
    "multipleOf": (_is_divisor, f"must be a positive number with at most {MAX_DIVISOR} as its significant digits"),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
}


_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_ONE_BY_ONE = frozenset({"$ref", "anyOf", "oneOf"})
_NO_CONSTRAINT = frozenset({"$defs", "definitions", "type"})
_SAYS_SO = frozenset({"additionalProperties", "patternProperties", "minProperties", "maxProperties"})


def close_objects(root: Any) -> Any:
    """A copy of a checked schema with its objects closed."""
    return root if _is_combined(root) else _closed(root)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {keyword: _below(keyword, value) for keyword, value in schema.items()}
    properties = schema.get("properties")
    if properties and set(schema.get("required", ())) <= properties.keys() and not _SAYS_SO & schema.keys():
        copy["additionalProperties"] = False
    return copy


def _below(keyword: str, value: Any) -> Any:
    if keyword in ("const", "enum"):
        return value
    if keyword in _NAMED_SCHEMAS:
        return {name: _closed(item) for name, item in value.items()}
    return _closed(value)


def _is_combined(schema: Any) -> bool:
    """Whether a value is anywhere described by two schemas at once."""
    if isinstance(schema, list):
        return any(_is_combined(item) for item in schema)
    if not isinstance(schema, dict):
        return False
    if "allOf" in schema or (_ONE_BY_ONE & schema.keys() and len(schema.keys() - _NO_CONSTRAINT) > 1):
        return True
    for keyword, value in schema.items():
        if keyword in _NAMED_SCHEMAS:
            if any(_is_combined(item) for item in value.values()):
                return True
        elif keyword not in ("const", "enum") and _is_combined(value):
            return True
    return False


# Keywords whose schemas describe the same value as the schema they stand in.
_IN_PLACE = ("anyOf", "oneOf", "allOf")
_MISSING = object()


def check_refs(root: Any, *, field: str) -> None:
    """Raises BadRequest for a reference out of the schema, to nothing, or that describes a value by itself, and for
    references that lead through too many others."""
    nodes = list(_nodes(root))
    places = {id(node) for node in nodes}
    targets: dict[str, Any] = {}
    for node in nodes:
        ref = node.get("$ref")
        if ref is None or ref in targets:
            continue
        targets[ref] = target = _find(root, ref)
        if not isinstance(target, bool) and id(target) not in places:
            raise BadRequest(
                f'{field}: "$ref": {ref!r} leads nowhere; references begin with "#/" and stay inside the schema',
                field=field,
            )

    def in_place(node: dict[str, Any]) -> Iterator[Any]:
        if "$ref" in node:
            yield targets[node["$ref"]]
        for keyword in _IN_PLACE:
            yield from node.get(keyword, ())

    def below(node: dict[str, Any]) -> Iterator[Any]:
        if "$ref" in node:
            yield targets[node["$ref"]]
        yield from _parts(node)

    _, circle = _descend(nodes, in_place)
    if circle:
        ref = next(node["$ref"] for node in circle if "$ref" in node)
        raise BadRequest(f'{field}: "$ref": {ref!r} is described by itself alone', field=field)
    depth, _ = _descend(nodes[:1], below)
    if depth > MAX_REFERENCED_DEPTH:
        raise BadRequest(
            f"{field}: references through references lead {depth} levels deep; {MAX_REFERENCED_DEPTH} are the most",
            field=field,
        )


def _descend(
    starts: list[dict[str, Any]], edges: Callable[[dict[str, Any]], Iterator[Any]]
) -> tuple[int, list[dict[str, Any]]]:
    """Depth first, each schema once: how deep it goes, and the schemas of a circle, if there is one."""
    is_on_the_way: dict[int, bool] = {}
    deepest = 0
    circle: list[dict[str, Any]] = []
    for start in starts:
        way = [] if id(start) in is_on_the_way else [(start, edges(start))]
        while way:
            node, rest = way[-1]
            is_on_the_way[id(node)] = True
            deepest = max(deepest, len(way))
            child = next((each for each in rest if isinstance(each, dict) and is_on_the_way.get(id(each), True)), None)
            if child is None:
                is_on_the_way[id(node)] = False
                way.pop()
            elif id(child) not in is_on_the_way:
                way.append((child, edges(child)))
            elif not circle:
                passed = [each for each, _ in way]
                circle = passed[next(at for at, each in enumerate(passed) if each is child) :]
    return deepest, circle


def _find(root: Any, ref: str) -> Any:
    """What a JSON pointer behind a `#` leads to."""
    if ref == "#":
        return root
    if not ref.startswith("#/"):
        return _MISSING
    node = root
    for part in ref[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return _MISSING
    return node if isinstance(node, dict | bool) else _MISSING


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object that is a schema."""
    if isinstance(schema, dict):
        yield schema
        for part in _parts(schema):
            yield from _nodes(part)


def _parts(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas that stand in a schema."""
    for keyword in ("items", "additionalProperties"):
        yield schema.get(keyword)
    for keyword in (*_IN_PLACE, "prefixItems"):
        yield from schema.get(keyword, ())
    for keyword in _NAMED_SCHEMAS:
        yield from schema.get(keyword, {}).values()
