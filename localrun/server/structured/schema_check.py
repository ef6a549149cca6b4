"""Which JSON schemas an answer can be held to. A keyword is enforced, known to enforce nothing, or refused by name.

What passes is copied without annotations, so that schemas that mean the same are compiled once.

Pure. Does not: compile, and so not see what only that shows (a pattern with look-around, alternatives of `oneOf` that
overlap); the engine refuses these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from localrun.errors import BadRequest
from localrun.server.structured.schema_closing import close_objects
from localrun.server.structured.schema_refs import check_refs

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 5_000
# Of one object: where they may all be left out, the beginning of a name costs time by their number (3,000: 30 ms).
MAX_PROPERTIES = 1_000
MAX_ENUM_VALUES = 10_000
MAX_PATTERN_CHARACTERS = 2_000
# Lengths, and numbers of items or properties.
MAX_COUNT = 1_000_000
# The automaton for a divisor has as many states as the divisor: a million of them took 2.3 s.
MAX_DIVISOR = 10_000

# What printers of JSON put between two values, and not all that JSON allows: a model that likes spaces never finishes.
_OPTIONS = {"x-guidance": {"whitespace_pattern": r" |\n[ \t]{0,20}"}}

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


def schema_text(schema: Any, *, field: str) -> str:
    """The text for the engine of a schema that was `checked`."""
    try:
        whole = {**_OPTIONS, **checked(schema, field=field)}
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
                    self._check(_is_pattern(pattern), below, f"the pattern {pattern!r} is too long")
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
    return isinstance(value, str) and len(value) <= MAX_PATTERN_CHARACTERS


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

_SCHEMA = frozenset({"items", "additionalProperties"})
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "$ref": (lambda value: isinstance(value, str), "must be a text"),
    "const": (lambda value: True, ""),
    "enum": (
        lambda value: isinstance(value, list) and 0 < len(value) <= MAX_ENUM_VALUES,
        f"must be a list of 1 to {MAX_ENUM_VALUES} values",
    ),
    "type": (_is_type, f"must be one or more of {', '.join(TYPES)}"),
    "required": (_is_names, "must be a list of names"),
    "pattern": (_is_pattern, f"must be a regular expression of at most {MAX_PATTERN_CHARACTERS} characters"),
    "format": (lambda value: value in FORMATS, f"the formats that can be enforced are {', '.join(FORMATS)}"),
    "multipleOf": (_is_divisor, f"must be a positive number with at most {MAX_DIVISOR} as its significant digits"),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
}
