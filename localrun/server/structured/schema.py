"""Which JSON schemas an answer can be held to.

Schemas come from generators, catalogues and by hand, in every dialect. A keyword is enforced, or says nothing about a
value and is skipped, as JSON schema has it for words that it does not know; what older dialects say in other words is
rewritten (rewriting.py). What cannot be enforced is left out and noted, with its path; where the client wants the
schema kept to the letter (`strict`) it is refused. So is what nobody means: a word that is one letter away from a
keyword, and a value that its keyword cannot have.

What passes is a copy of keywords alone, so that schemas that mean the same are compiled once. References lead
somewhere, and not only to themselves; recursion through an array or an object is fine, since the answer decides how
deep it goes.

Pure. Does not: compile, and so not see what only that shows, such as a pattern that is no regular expression; the
engine refuses it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from localrun.errors import BadRequest
from localrun.server import notices
from localrun.server.structured import rewriting
from localrun.server.structured.whole import (
    NAMED_SCHEMAS,
    TYPES,
    check_refs,
    close_objects,
    find,
    inline_refs,
    missing_targets,
    without_one_of,
)
from localrun.wire import STRICT_COMMENT

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 5_000
# Four for each of them; whatever is no keyword is compared with all of them.
MAX_WORDS = 20_000
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
_PLAIN_IN_PATTERN = re.compile(r"\\[^1-9kbB<>]|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_NOT_IN_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9kbB<>]")

# Hold a value to something, but no grammar of the library does.
_UNENFORCED = frozenset(
    {
        *("not", "if", "uniqueItems", "contains", "propertyNames", "dependentRequired", "dependentSchemas"),
        *("dependencies", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "disallow"),
        *("extends", "divisibleBy"),
    }
)
# The same, where their value is the one that everything matches.
_HOLDS_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "dependencies": ({},),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), (True, {})),
}
# Words that are no slip of a keyword, though one letter away from it.
_OTHER_WORDS = frozenset({"id", "cost", "defs", "href"})


def schema_text(schema: Any, *, field: str, strict: bool = False) -> str:
    """The text for the engine of a schema that was `checked`."""
    try:
        note = {"$comment": STRICT_COMMENT} if strict else {}
        whole = {"x-guidance": _OPTIONS, **note, **checked(schema, field=field, strict=strict)}
        return json.dumps(whole, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise BadRequest(f"{field} has a number that JSON has not: {error}", field=field) from error
    except RecursionError as error:
        raise BadRequest(f"{field} has a value that is nested too deeply", field=field) from error


def checked(schema: Any, *, field: str, strict: bool = False) -> dict[str, Any]:
    """A copy of `schema` that only has keywords that are enforced; what is left out is noted (`notices`), or with
    `strict` refused. Raises BadRequest naming the path below `field`."""
    if not isinstance(schema, dict):
        raise BadRequest(f"{field} must be a JSON schema, which is an object", field=field)
    walk = _Walk(schema, field, strict=strict)
    root: dict[str, Any] = walk.schema(schema, field, depth=0)
    # What references lead to may be written in words that are not kept, `oneOf` among them.
    for _ in range(2):
        for name, target in missing_targets(schema, root):
            root.setdefault("$defs", {})[name] = walk.schema(target, f"{field}.{name}", depth=1)
        check_refs(root, field=field)
        for alternatives in without_one_of(root):
            walk.leave_out(f"oneOf {alternatives}", "one value may match several of these; it is taken as anyOf")
    inline_refs(root)
    close_objects(root)
    return root


class _Walk:
    """One pass over a schema."""

    def __init__(self, written: Any, field: str, *, strict: bool) -> None:
        self._written = written
        self._field = field
        self._is_strict = strict
        self._n_subschemas = 0
        self._n_words = 0

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
        schema = rewriting.modern(schema)
        if "propertyNames" in schema:
            names = schema["propertyNames"]
            if isinstance(names, dict) and isinstance(names.get("$ref"), str):
                names = find(self._written, names["$ref"])
            named = rewriting.named_by(schema, names)
            if named is not None:
                schema = {keyword: value for keyword, value in named.items() if keyword != "propertyNames"}
        self._n_words += len(schema)
        if self._n_words > MAX_WORDS:
            raise self._refusal(path, f"the schema has more than {MAX_WORDS} keywords and other words")
        copy: dict[str, Any] = {}
        for keyword, value in schema.items():
            if self._is_enforced(keyword, value, schema, path):
                copy[keyword] = self._keyword(keyword, value, path, depth + 1)
        copy, inexact = rewriting.exact(copy)
        for keyword in inexact:
            self.leave_out(f"{path}.{keyword}", "numbers beyond 2^53 cannot be told apart; a text can")
        return rewriting.patterned(rewriting.typed(rewriting.merged(copy)))

    def leave_out(self, path: str, why: str) -> None:
        """Something of the schema is not enforced: noted, or refused where that was asked for."""
        if self._is_strict:
            by = "the setting strict_schemas" if notices.STRICT_SCHEMAS.get() else "a strict schema"
            raise self._refusal(path, f"{why}, which {by} does not allow")
        notices.note(f"{path}: {why}")

    def _is_enforced(self, keyword: str, value: Any, schema: dict[str, Any], path: str) -> bool:
        """Whether it is a keyword that holds a value to something and can be. Raises BadRequest for a slip of one."""
        if keyword == "x-guidance":
            raise self._refusal(path, f"the keyword {keyword!r} is not supported")
        if keyword in _UNENFORCED:
            if value not in _HOLDS_NOTHING.get(keyword, ()):
                self.leave_out(f"{path}.{keyword}", "cannot be enforced")
            return False
        if keyword not in KEYWORDS:
            if keyword not in _OTHER_WORDS:
                meant = next((each for each in KEYWORDS if _is_slip(keyword, each)), None)
                if meant is not None:
                    raise self._refusal(path, f"the keyword {keyword!r} is not known; is {meant!r} meant?")
            return False
        why = _why_not(keyword, value, schema)
        if why:
            self.leave_out(f"{path}.{keyword}", why)
        return why is None

    def _keyword(self, keyword: str, value: Any, path: str, depth: int) -> Any:
        below = f"{path}.{keyword}"
        if keyword in _SCHEMA:
            return self.schema(value, below, depth=depth)
        if keyword in _SCHEMAS:
            if not isinstance(value, list) or not value:
                raise self._refusal(below, "must be a list of schemas")
            return [self.schema(item, f"{below}[{index}]", depth=depth) for index, item in enumerate(value)]
        if keyword in NAMED_SCHEMAS:
            if not isinstance(value, dict):
                raise self._refusal(below, "must be an object of schemas")
            if keyword == "properties":
                self._check(len(value) <= MAX_PROPERTIES, below, f"an object may list {MAX_PROPERTIES} properties")
            return {name: self.schema(item, f"{below}.{name}", depth=depth) for name, item in value.items()}
        is_valid, wanted = _VALUES[keyword]
        self._check(is_valid(value), below, wanted)
        return int(value) if keyword in _COUNTS else value

    def _check(self, is_valid: bool, path: str, wanted: str) -> None:
        if not is_valid:
            raise self._refusal(path, wanted)

    def _refusal(self, path: str, message: str) -> BadRequest:
        return BadRequest(f"{path}: {message}", field=self._field)


_PATTERN = (
    f"patterns that can be enforced have at most {MAX_PATTERN_CHARACTERS} characters, and neither look-around nor "
    f"backreferences nor edges of words"
)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= MAX_COUNT and value == int(value)


def _is_pattern(value: Any) -> bool:
    if not isinstance(value, str) or len(value) > MAX_PATTERN_CHARACTERS:
        return False
    return not _NOT_IN_PATTERN.search(_PLAIN_IN_PATTERN.sub("", value))


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_divisor(value: float) -> bool:
    """The divisor's digits without the point, as the automaton sees it."""
    return 1e-9 <= value <= 1e9 and int(f"{value:.12f}".replace(".", "").strip("0")) <= MAX_DIVISOR


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SCHEMA = frozenset({"items", "additionalProperties"})
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "$ref": (_is_text, "must be a text"),
    "const": (lambda value: True, ""),
    "enum": (
        lambda value: isinstance(value, list) and 0 < len(value) <= MAX_ENUM_VALUES,
        f"must be a list of 1 to {MAX_ENUM_VALUES} values",
    ),
    "type": (_is_type, f"must be one or more of {', '.join(TYPES)}"),
    "required": (_is_names, "must be a list of names"),
    "pattern": (_is_text, "must be a regular expression"),
    "format": (_is_text, "must be a text"),
    "multipleOf": (_is_positive, "must be a positive number"),
    **dict.fromkeys(_COUNTS, (_is_count, f"must be a whole number from 0 to {MAX_COUNT}")),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (_is_number, "must be a number")),
}
KEYWORDS = frozenset({*_VALUES, *_SCHEMA, *_SCHEMAS, *NAMED_SCHEMAS})


def _why_not(keyword: str, value: Any, schema: dict[str, Any]) -> str | None:
    """Why a keyword of `schema` is not enforced: "" if it holds nothing there, None if it is enforced, or if its value
    is none."""
    match keyword:
        case "format" if _is_text(value) and value not in rewriting.ENFORCED_FORMATS:
            known = f"the formats that can be enforced are {', '.join(rewriting.ENFORCED_FORMATS)}"
            return "" if value in rewriting.FORMATS_WITHOUT_MEANING else known
        case "pattern" if _is_text(value) and not _is_pattern(value):
            return _PATTERN
        case "patternProperties" if isinstance(value, dict) and not all(map(_is_pattern, value)):
            return _PATTERN
        case "additionalProperties" if _why_not("patternProperties", schema.get("patternProperties"), schema):
            return ""  # those whom the patterns allow would be refused
        case "multipleOf" if _is_positive(value) and not _is_divisor(value):
            return f"a divisor has at most {MAX_DIVISOR} as its significant digits"
        case "maxLength" | "maxItems" | "maxProperties" if _is_number(value) and value > MAX_COUNT:
            return ""
        case "minProperties" | "maxProperties" if _is_count(value):
            return _why_uncounted(keyword, int(value), schema)
        case "$ref" if _is_text(value) and not value.startswith("#"):
            return f"{value[:60]!r} is outside of the schema"
    return None


def _why_uncounted(keyword: str, count: int, schema: dict[str, Any]) -> str | None:
    """Counts of properties are only enforced where all that are listed are required."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list) or set(listed) <= set(required):
        return None
    if keyword == "minProperties" and count <= len(required):
        return ""
    return "properties are only counted where all of them are required"


def _is_slip(word: str, keyword: str) -> bool:
    """Whether they differ by one letter that is missing, too much or another one, or by two that changed places. What
    begins with a sign, as the words of other notations do (`@type`), is none."""
    if len(keyword) < 4 or abs(len(word) - len(keyword)) > 1 or not (word[:1].isalpha() or word[:1] == keyword[0]):
        return False
    head = next((at for at, (one, other) in enumerate(zip(word, keyword, strict=False)) if one != other), len(word))
    rests = word[head:], keyword[head:]
    if rests[0][:2] == rests[1][1::-1] and len(rests[0]) > 1:
        return rests[0][2:] == rests[1][2:]
    return word != keyword and any(rests[0][a:] == rests[1][b:] for a, b in ((0, 1), (1, 0), (1, 1)))
