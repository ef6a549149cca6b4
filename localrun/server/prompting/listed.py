"""A tool's parameters as arguments that are written one by one: which there are, and what each value is held to.

A value between texts (`Listed`) is bare text where its schema allows texts, and JSON otherwise. Bare text is held to
the schema's constants alone. Which one it is must be told as the readers tell it (`types_of`).
Pure. Does not: write a grammar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localrun.errors import BadRequest
from localrun.server import notices, structured
from localrun.server.parsing.pieces import dump_json
from localrun.server.parsing.written import NAME, Listed
from localrun.server.parsing.xml_calls import types_of

# Alternatives and references deeper than that are nobody's arguments.
_MAX_DEPTH = 8
_NOT_OF_BARE_TEXT = ("minLength", "maxLength", "pattern", "format")


def argument_shapes(
    listed: Listed, parameters: Mapping[str, Any], *, field: str, control_tokens: Sequence[str]
) -> tuple[structured.ArgumentShape, ...]:
    """The arguments of a tool, in the order of its schema; last one whose name is the model's own, where the schema
    allows any. `parameters` were checked at `field`."""
    properties: dict[str, Any] = {}
    required = dict.fromkeys(_gather(parameters, parameters, properties, 0))
    for name in required:
        properties.setdefault(name, {})
    shapes = [
        _shape(listed, name, schema, parameters, field, control_tokens, is_required=name in required)
        for name, schema in properties.items()
        if schema is not False
    ]
    others = parameters.get("additionalProperties", not properties and "properties" not in parameters)
    if others is not False and NAME not in listed.after:
        schema = others if isinstance(others, dict) else {}
        shapes.append(_shape(listed, "", schema, parameters, field, control_tokens, is_required=False))
    return tuple(shapes)


def _gather(schema: Any, root: Mapping[str, Any], properties: dict[str, Any], depth: int) -> Iterator[str]:
    """Collects the properties that an object may have, and gives those that it must have."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    own = schema.get("properties")
    if isinstance(own, Mapping):
        for name, described in own.items():
            properties.setdefault(name, described)
    required = schema.get("required")
    yield from (name for name in (required if isinstance(required, list) else ()) if isinstance(name, str))
    yield from _gather(_target(schema.get("$ref"), root), root, properties, depth + 1)
    for part in schema.get("allOf") or ():
        yield from _gather(part, root, properties, depth + 1)
    for alternatives in (schema.get("anyOf") or (), schema.get("oneOf") or ()):
        each = [set(_gather(part, root, properties, depth + 1)) for part in alternatives]
        yield from sorted(set.intersection(*each)) if each else ()


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target: Any = root
    for part in filter(None, reference[1:].split("/")):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target


def _shape(
    listed: Listed,
    name: str,
    schema: Any,
    root: Mapping[str, Any],
    field: str,
    control_tokens: Sequence[str],
    *,
    is_required: bool,
) -> structured.ArgumentShape:
    path = f"properties.{name}" if name else "additionalProperties"
    allowed = types_of(schema, root)
    is_text = listed.quote is not None and (not allowed or "string" in allowed)
    before, after = listed.texts_round(is_text=is_text)
    after = after.replace(NAME, name)
    named = (before.replace(NAME, name),) if name else tuple(before.split(NAME))
    if not is_text:
        value = _alone(schema, root, allowed, f"{field}.{path}")
        return structured.ArgumentShape(named, after, value, is_required=is_required, path=path)
    texts = _constants(schema)
    if texts:
        return structured.ArgumentShape(named, after, texts=texts, is_required=is_required, path=path)
    for keyword in _NOT_OF_BARE_TEXT:
        if isinstance(schema, Mapping) and keyword in schema:
            notices.note(f"{field}.{path}.{keyword}: this model writes texts bare, and those cannot be held to it")
    until = listed.quote or after.strip()
    controls = [token for token in control_tokens if token and token in until]
    return structured.ArgumentShape(
        named,
        after[after.index(until) + len(until) :],
        until=until,
        control=min(controls, key=until.index, default=""),
        is_required=is_required,
        path=path,
    )


def _alone(schema: Any, root: Mapping[str, Any], allowed: set[str], field: str) -> dict[str, Any]:
    """The schema of one value by itself; what it refers to elsewhere than in the definitions is left out."""
    made = dict(schema) if isinstance(schema, Mapping) else {}
    if '"$ref"' in dump_json(made):
        made |= {key: root[key] for key in ("$defs", "definitions") if key in root}
    try:
        structured.json_schema(made, field=field, strict=False)
    except BadRequest:
        return {"type": sorted(allowed)} if allowed else {}
    return made


def _constants(schema: Any) -> tuple[str, ...]:
    """The texts that a bare value may be, if its schema lists them."""
    if not isinstance(schema, Mapping):
        return ()
    values = [schema["const"]] if "const" in schema else schema.get("enum") or ()
    return tuple(value if isinstance(value, str) else dump_json(value) for value in values)
