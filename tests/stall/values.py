"""Large values by type: long texts, many items, deep nesting, and what matches nothing; for a new field at once.

`grown(type, n_bytes)` gives pairs of a label and what makes a value whose JSON is about that long; recursion into the
parts of a type puts the growth there. Made only when it is sent: most of them stay unsent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

Make = Callable[[], Any]

_DEPTH = 3
_LEVELS = 200


def grown(type_: Any, n_bytes: int, depth: int = 0) -> Iterator[tuple[str, Make]]:
    """`type_` is one of msgspec.inspect's."""
    if isinstance(type_, msgspec.inspect.UnionType):
        for one in type_.types:
            yield from grown(one, n_bytes, depth)
    elif isinstance(type_, msgspec.inspect.StrType):
        yield from _texts(n_bytes)
    elif isinstance(type_, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        yield "digits", lambda: 10 ** min(4000, n_bytes)
    elif isinstance(type_, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
        yield "empty items", lambda: _many([smallest(type_.item_type)], n_bytes)
        for label, make in _inner(type_.item_type, n_bytes, depth):
            yield f"an item: {label}", lambda make=make: [make()]
        for label, make in _inner(type_.item_type, 200, depth):
            yield f"items: {label}", lambda make=make: _many([make()], n_bytes)
    elif isinstance(type_, msgspec.inspect.DictType):
        yield "keys", lambda: _keys(smallest(type_.value_type), n_bytes)
        yield "a key", lambda: {"k" * n_bytes: smallest(type_.value_type)}
        for label, make in _inner(type_.value_type, n_bytes, depth):
            yield f"a value: {label}", lambda make=make: {"k": make()}
    elif isinstance(type_, msgspec.inspect.StructType):
        for field in type_.fields:
            for label, make in _inner(field.type, n_bytes, depth):
                yield (
                    f"{field.encode_name}: {label}",
                    lambda make=make, name=field.encode_name: smallest(type_) | {name: make()},
                )
    elif isinstance(type_, msgspec.inspect.AnyType):
        yield from anything(n_bytes)


def anything(n_bytes: int) -> Iterator[tuple[str, Make]]:
    """What a field of any type may be, schemas among it."""
    yield from _texts(n_bytes)
    yield "empty lists", lambda: _many([[]], n_bytes)
    yield "numbers", lambda: _many([1], n_bytes)
    yield "keys", lambda: _keys(1, n_bytes)
    yield "depth", lambda: _nested(min(_LEVELS, n_bytes // 8))
    yield "objects", lambda: _many([{"type": "text", "text": ""}], n_bytes)
    yield "unknown objects", lambda: _many([{"type": "nothing", "id": "nobody", "x": [[]]}], n_bytes)
    yield "a constant", lambda: {"const": _many([1], n_bytes)}
    yield "an enumeration", lambda: {"enum": [f"{number:08}" for number in range(n_bytes // 11)]}
    yield "references through references", lambda: _links(n_bytes // 40)
    yield "references to nothing", lambda: {"anyOf": [{"$ref": f"#/$defs/x{n}"} for n in range(n_bytes // 24)]}
    yield "properties", lambda: {"type": "object", "properties": _keys({"type": "string"}, n_bytes)}
    yield "patterns", lambda: {"type": "object", "patternProperties": _keys({}, n_bytes)}
    # Below the limit of values, so that they are looked at, whatever `n_bytes` is.
    yield "as many references as may be", lambda: _links(min(4_900, n_bytes // 40))
    yield "as many values as may be", lambda: {"const": _many([[]], min(n_bytes, 290_000))}


def smallest(type_: Any) -> Any:
    """A value of the type that is not long."""
    if isinstance(type_, msgspec.inspect.UnionType):
        some = [one for one in type_.types if not isinstance(one, msgspec.inspect.NoneType)]
        return smallest(some[0]) if some else None
    if isinstance(type_, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        return 1
    if isinstance(type_, msgspec.inspect.BoolType):
        return False
    if isinstance(type_, msgspec.inspect.StructType):
        return {field.encode_name: smallest(field.type) for field in type_.fields if field.required}
    if isinstance(type_, msgspec.inspect.DictType):
        return {}
    if isinstance(type_, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
        return []
    if isinstance(type_, msgspec.inspect.LiteralType):
        return type_.values[0]
    return "a"


def _inner(type_: Any, n_bytes: int, depth: int) -> Iterator[tuple[str, Make]]:
    if depth < _DEPTH:
        yield from grown(type_, n_bytes, depth + 1)


def _texts(n_bytes: int) -> Iterator[tuple[str, Make]]:
    yield "a word", lambda: "x" * n_bytes
    yield "words", lambda: "once upon a time " * (n_bytes // 17)
    yield "halves of control tokens", lambda: "<|im_" * (n_bytes // 5)
    yield "control tokens", lambda: "<|im_end|>" * (n_bytes // 10)
    yield "escapes", lambda: "\u00e9\n" * (n_bytes // 8)
    yield "rules", lambda: "root ::= r0\n" + "".join(f'r{n} ::= "x" r{n + 1}\n' for n in range(n_bytes // 20))


def _many(items: list[Any], n_bytes: int) -> list[Any]:
    return items * max(1, n_bytes // (len(json.dumps(items)) - 1))


def _keys(value: Any, n_bytes: int) -> dict[str, Any]:
    return {f"{number:07}": value for number in range(n_bytes // (12 + len(json.dumps(value))))}


def _links(n_links: int) -> dict[str, Any]:
    links = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(n_links)} | {f"a{n_links}": {"type": "string"}}
    return {"$defs": links, "$ref": "#/$defs/a0"}


def _nested(n_levels: int) -> Any:
    value: Any = "x"
    for _ in range(n_levels):
        value = {"type": "object", "properties": {"a": value}}
    return value
