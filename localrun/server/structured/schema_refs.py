"""References inside a JSON schema: they lead somewhere, and not only to themselves.

Recursion through an array or an object is fine; the answer decides how deep it goes. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from localrun.errors import BadRequest

# Keywords whose schemas describe the same value as the schema they stand in.
_IN_PLACE = ("anyOf", "oneOf", "allOf")
_MISSING = object()


def check_refs(root: Any, *, field: str) -> None:
    """Raises BadRequest for a reference out of the schema, to nothing, or that describes a value by itself."""
    refs = {node["$ref"] for node in _nodes(root) if "$ref" in node}
    leads_to: dict[str, set[str]] = {}
    for ref in refs:
        target = _find(root, ref)
        if target is _MISSING:
            raise BadRequest(
                f'{field}: "$ref": {ref!r} leads nowhere; references begin with "#/" and stay inside the schema',
                field=field,
            )
        leads_to[ref] = set(_refs_in_place(target))
    for ref in refs:
        if _reaches(leads_to, ref):
            raise BadRequest(f'{field}: "$ref": {ref!r} is described by itself alone', field=field)


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


def _refs_in_place(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"]
        for keyword in _IN_PLACE:
            for alternative in schema.get(keyword, ()):
                yield from _refs_in_place(alternative)


def _reaches(leads_to: dict[str, set[str]], start: str) -> bool:
    """Whether one comes back to `start`."""
    seen: set[str] = set()
    todo = list(leads_to[start])
    while todo:
        ref = todo.pop()
        if ref == start:
            return True
        if ref not in seen:
            seen.add(ref)
            todo += leads_to[ref]
    return False


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object that is a schema."""
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword in ("items", "additionalProperties"):
        yield from _nodes(schema.get(keyword))
    for keyword in (*_IN_PLACE, "prefixItems"):
        for item in schema.get(keyword, ()):
            yield from _nodes(item)
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        for item in schema.get(keyword, {}).values():
            yield from _nodes(item)
