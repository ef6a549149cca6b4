"""What needs the whole of a checked schema: references, alternatives of `oneOf`, and objects that get no others.

References lead somewhere inside the schema and end somewhere; schema.py replaces those that lead out of it before.

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
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, unquote

from localrun.errors import BadRequest
from localrun.server.structured.rewriting import are_apart

# Through references as well, which are compiled by recursion: 2,000 to 3,000 of these levels overflow the stack.
MAX_REFERENCED_DEPTH = 600
# Keywords whose schemas describe the same value as the schema they stand in.
IN_PLACE = ("anyOf", "oneOf", "allOf")
# Of what is put in the place of references, so that a schema does not outgrow the limit of grammars by it.
_MAX_INLINED_CHARACTERS = 64 * 1024
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")

_MISSING = object()


def check_refs(root: Any, *, field: str) -> None:
    """Raises BadRequest for a reference to nothing, or that describes a value by itself, and for references that lead
    through too many others."""
    nodes = list(nodes_of(root))
    places = {id(node) for node in nodes}
    targets: dict[str, Any] = {}
    for node in nodes:
        ref = node.get("$ref")
        if ref is None or ref in targets:
            continue
        targets[ref] = target = find(root, ref)
        if not isinstance(target, bool) and id(target) not in places:
            raise BadRequest.of(
                field, f'"$ref": {ref!r} leads nowhere; references begin with "#/" and stay inside the schema'
            )

    def in_place(node: dict[str, Any]) -> Iterator[Any]:
        if "$ref" in node:
            yield targets[node["$ref"]]
        for keyword in IN_PLACE:
            yield from node.get(keyword, ())

    def below(node: dict[str, Any]) -> Iterator[Any]:
        if "$ref" in node:
            yield targets[node["$ref"]]
        yield from _parts(node)

    _, circle = _descend(nodes, in_place)
    if circle:
        ref = next(node["$ref"] for node in circle if "$ref" in node)
        raise BadRequest.of(field, f'"$ref": {ref!r} is described by itself alone')
    depth, _ = _descend(nodes[:1], below)
    if depth > MAX_REFERENCED_DEPTH:
        raise BadRequest.of(
            field, f"references through references lead {depth} levels deep; {MAX_REFERENCED_DEPTH} are the most"
        )


def resolved(root: Any, schema: Any) -> Any:
    """What describes a value, where `schema` of a checked `root` is only a reference to it."""
    while isinstance(schema, dict) and schema.keys() == {"$ref"}:
        schema = find(root, schema["$ref"])
    return schema


def missing_targets(written: Any, root: Any) -> Iterator[tuple[str, Any]]:
    """The schemas that references of a checked `root` lead to in what the client has `written`, under words that are no
    keywords, by a name (`#name`), or where a keyword was rewritten. Each is to be checked and put into `$defs` of
    `root` by the name that comes with it, before the next one is asked for; its references will lead there."""
    names: dict[str, str] = {}
    waiting = list(nodes_of(root))
    named: dict[str, Any] | None = None
    while waiting:
        node = waiting.pop()
        ref = node.get("$ref", "")
        if ref not in names:
            if not ref or find(root, ref) is not _MISSING:
                if ref:  # the library reads no `<` of `#/definitions/List<Item>`
                    node["$ref"] = quote(unquote(ref), safe="#/~$")
                continue
            if not ref.startswith("#/") and named is None:
                named = _named(written)
            target = find(written, ref) if named is None or ref.startswith("#/") else named.get(ref, _MISSING)
            if target is _MISSING:
                continue
            names[ref] = name = f"elsewhere-{len(root.get('$defs', ()))}"
            yield name, target
            waiting += nodes_of(root["$defs"][name])
        node["$ref"] = f"#/$defs/{names[ref]}"


def _named(written: Any) -> dict[str, Any]:
    """The schemas that have a name, in the words of any draft, by `#` and the name."""
    found: dict[str, Any] = {}
    for node in nodes_of(written):
        for name in (f"#{node.get('$anchor')}", node.get("$id"), node.get("id")):
            if isinstance(name, str):
                found.setdefault(name, node)
    return found


def inline_refs(root: Any) -> None:
    """Where other keywords stand beside a reference, puts what it leads to in its place, in place, if the whole is what
    both say: the library takes no others beside one that leads back to itself, and an object that is described once
    can be closed. The schemas inside become references, so that nothing is written twice."""
    n_left = _MAX_INLINED_CHARACTERS
    for node in reversed(list(nodes_of(root))):
        rest = {keyword: value for keyword, value in node.items() if keyword != "$ref"}
        if "$ref" not in node or not rest.keys() - {"$defs", "definitions"}:
            continue
        ref, target = node["$ref"], find(root, node["$ref"])
        while isinstance(target, dict) and target.keys() == {"$ref"}:
            ref, target = target["$ref"], find(root, target["$ref"])
        if not isinstance(target, dict):
            continue
        inlined = _by_reference(target, ref)
        n_left -= len(json.dumps(inlined))
        if n_left < 0:
            return
        if (both := _both(inlined, rest)) is not None:
            node.clear()
            node.update(both)


def _by_reference(schema: dict[str, Any], ref: str) -> dict[str, Any]:
    """The schema that `ref` leads to, with references to those inside."""

    def inner(value: Any, *way: str) -> Any:
        names = [name.replace("~", "~0").replace("/", "~1") for name in way]
        return {"$ref": quote("/".join((unquote(ref), *names)), safe="#/~$")} if isinstance(value, dict) else value

    copy: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties"):
            copy[keyword] = {name: inner(each, keyword, name) for name, each in value.items()}
        elif keyword in (*IN_PLACE, "prefixItems"):
            copy[keyword] = [inner(each, keyword, str(at)) for at, each in enumerate(value)]
        elif keyword in ("items", "additionalProperties"):
            copy[keyword] = inner(value, keyword)
        elif keyword not in ("$defs", "definitions"):
            copy[keyword] = value
    return copy


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """One schema for what matches both, if their keywords can stand side by side."""
    properties, others = one.get("properties", {}), other.get("properties", {})
    if "$ref" in one or properties.keys() & others.keys() or are_apart(one, other):
        return None
    shared = one.keys() & other.keys() - {"properties", "required"}
    if any(one[keyword] != other[keyword] for keyword in shared):
        return None
    both = one | other
    if properties or others:
        both["properties"] = properties | others
    if "required" in both:
        both["required"] = [*dict.fromkeys([*one.get("required", ()), *other.get("required", ())])]
    return both


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


def find(root: Any, ref: str) -> Any:
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


def nodes_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object that is a schema."""
    if isinstance(schema, dict):
        yield schema
        for part in _parts(schema):
            yield from nodes_of(part)


def _parts(schema: dict[str, Any]) -> Iterator[Any]:
    for keyword in ("items", "additionalProperties"):
        yield schema.get(keyword)
    for keyword in (*IN_PLACE, "prefixItems"):
        yield from schema.get(keyword, ())
    for keyword in NAMED_SCHEMAS:
        yield from schema.get(keyword, {}).values()


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


def close_objects(root: Any) -> None:
    """Closes the objects of a checked schema, in place."""
    nodes = list(nodes_of(root))
    if any(map(_is_combined, nodes)):
        return
    for node in nodes:
        listed = node.get("properties")
        if listed is not None and set(node.get("required", ())) <= listed.keys() and not _SAYS_SO & node.keys():
            node["additionalProperties"] = False


def _is_combined(schema: dict[str, Any]) -> bool:
    """Whether it describes a value by two schemas at once."""
    return "allOf" in schema or bool(_ONE_BY_ONE & schema.keys() and len(schema.keys() - _NO_CONSTRAINT) > 1)
