"""A JSON schema in a few words of HTML: types, limits, links to shapes.

Pure. Does not: lay out a page (`page.py` does).
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minProperties": "at least {} entries",
    "maxProperties": "at most {} entries",
    "pattern": "matches {}",
}


def anchor(name: str) -> str:
    """Where the page describes a shape."""
    return f"shape-{name}"


def type_html(schema: dict[str, Any]) -> str:
    """What a value may be."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{anchor(name)}">{escape(name)}</a>'
    if "anyOf" in schema:
        kinds = [type_html(one) for one in schema["anyOf"] if one != {"type": "null"}]
        return " or ".join(kinds) or "null"
    if "enum" in schema:
        return " | ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    kind = schema.get("type")
    if kind == "array":
        shown = f"list of {type_html(schema.get('items', {}))}"
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        shown = f"object of {type_html(schema['additionalProperties'])}"
    else:
        shown = escape(str(kind)) if kind else "anything"
    limits = [words.format(escape(_number(schema[name]))) for name, words in _LIMITS.items() if name in schema]
    return shown + (f' <span class="limit">{", ".join(limits)}</span>' if limits else "")


def default_html(schema: dict[str, Any]) -> str:
    """Empty without one, or where it is null: then the note says what happens."""
    default = schema.get("default")
    return "" if default is None else f" = <code>{escape(json.dumps(default))}</code>"


def _number(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
