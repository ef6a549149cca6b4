"""Objects that list their properties get no others, unless the schema says so.

JSON schema lets an object have any further property when `additionalProperties` is left out. Hardly anybody means
that, and a small model that may invent keys does so without end. An answer without them matches the schema as well.
Where a value is described by two schemas at once (`allOf`, `$ref` beside `properties`) each knows only its own
properties; a schema in which that occurs is left as it is.

Pure.
"""

from __future__ import annotations

from typing import Any

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
