"""`oneOf`, and objects that get no further properties: what is changed of a schema when all of it was checked.

The grammar library takes an answer that matches several alternatives of `oneOf`. Where no value can, `oneOf` is
`anyOf`: the alternatives have other types, other constants, or other constants in a property that all require.

Objects that list their properties get no others, unless the schema says so. JSON schema lets an object have any further
property when `additionalProperties` is left out. Hardly anybody means that, and a small model that may invent keys does
so without end. An answer without them matches the schema as well. Where a value is described by two schemas at once
(`allOf`, `$ref` beside `properties`) each knows only its own properties; such a schema is left as it is.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from localrun.server.structured.references import NAMED_SCHEMAS, nodes_of, resolved

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
# Properties that are looked at for constants that tell alternatives apart: they stand in front.
_MAX_TAGS = 20


def without_one_of(root: Any) -> Iterator[str]:
    """Turns each `oneOf` of a checked schema into `anyOf`, in place, and gives those texts where a value may match
    several alternatives."""
    schemas = [*{id(schema): schema for schema in nodes_of(root) if "oneOf" in schema}.values()]
    told_apart = [_are_apart(root, schema["oneOf"]) for schema in schemas]
    for schema, is_any_of in zip(schemas, told_apart, strict=True):
        alternatives = schema.pop("oneOf")
        if not is_any_of:
            yield _shown(alternatives)
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": alternatives}]
        else:
            schema["anyOf"] = alternatives


def _shown(alternatives: list[Any]) -> str:
    text = json.dumps(alternatives, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _are_apart(root: Any, alternatives: list[Any]) -> bool:
    """Whether no value can match two of them. The work grows with what they list, not with the pairs of them."""
    of_kind: dict[str, list[dict[str, Any]]] = {}
    for schema in (resolved(root, each) for each in alternatives):
        if not isinstance(schema, dict):
            return False
        for kind in _kinds(schema):
            of_kind.setdefault(kind, []).append(schema)
    return all(
        _have_other_constants(schemas) or (kind == "object" and _have_other_tags(root, schemas))
        for kind, schemas in of_kind.items()
        if len(schemas) > 1
    )


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The types that a value may have; what says none may have any."""
    types = schema.get("type", TYPES)
    found = {types} if isinstance(types, str) else set(types)
    return found | {"integer"} if "number" in found else found


def _have_other_constants(schemas: list[Any]) -> bool:
    """Whether each of them is a list of constants, and no two have one in common."""
    found = [_values(schema) for schema in schemas]
    lists = [values for values in found if values is not None]
    return len(lists) == len(found) and len(set().union(*lists)) == sum(map(len, lists))


def _have_other_tags(root: Any, schemas: list[dict[str, Any]]) -> bool:
    """Whether there is a property that all require, with other constants in each."""

    def tagged(name: str) -> bool:
        tags = [schema.get("properties", {}).get(name) for schema in schemas if name in schema.get("required", ())]
        return len(tags) == len(schemas) and _have_other_constants([resolved(root, tag) for tag in tags])

    constant = [name for name, each in schemas[0].get("properties", {}).items() if _values(resolved(root, each))]
    return any(map(tagged, constant[:_MAX_TAGS]))


def _values(schema: Any) -> set[str] | None:
    """The constants that match, as texts that differ if they do; None where others match as well, or for structures."""
    if not isinstance(schema, dict):
        return None
    constants = [schema["const"]] if "const" in schema else schema.get("enum")
    if constants is None or any(isinstance(each, list | dict) for each in constants):
        return None
    # 1 and 1.0 are the same value, and True is another one.
    return {json.dumps(each if isinstance(each, bool | str) or each is None else float(each)) for each in constants}


_ONE_BY_ONE = frozenset({"$ref", "anyOf"})
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
    if properties is not None and set(schema.get("required", ())) <= properties.keys() and not _SAYS_SO & schema.keys():
        copy["additionalProperties"] = False
    return copy


def _below(keyword: str, value: Any) -> Any:
    if keyword in ("const", "enum"):
        return value
    if keyword in NAMED_SCHEMAS:
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
        if keyword in NAMED_SCHEMAS:
            if any(_is_combined(item) for item in value.values()):
                return True
        elif keyword not in ("const", "enum") and _is_combined(value):
            return True
    return False
