"""The OpenAPI 3.1 document of the whole server, made of the routes' body structs and of the operations.

Pure. A limit in a struct is a limit in the document; nothing is written twice.

Does not: know what a route does with a body.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import msgspec

import localrun
from localrun.config import Settings
from localrun.errors import LocalrunError
from localrun.server.http.limits import MAX_TEXT_BYTES
from localrun.server.http.operation import ANSWER_HEADERS, JSON, REQUEST_HEADERS, Operation
from localrun.server.openapi.answers import error_type

Json = dict[str, Any]

_REF = "#/components/schemas/"
_AREAS = {"openai": "OpenAI"}
# Met by programs that use the daemon, and never its answer.
_NEVER_SENT = {"port_busy", "daemon_unreachable", "untrusted_certificate", "service_failed", "tools_unavailable"}
# Of use to readers of the code alone.
_SEE_MODULE = re.compile(r"^See the module\. ?")
# Of any request: no key, or a wrong one; a foreign Host or Origin; many wrong keys.
_OF_ALL = (401, 403, 429)
# How a key may be sent: as OpenAI's and Ollama's clients do, and as Anthropic's do.
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "What `localrun key create` prints"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same"},
}
_WITH_BODY = (400, 413, 415)
_WITH_MODEL = (404, 422, 429, 499, 500, 501, 503, 507)


def document_of(operations: Sequence[Operation]) -> Json:
    types = _types(operations)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF + "{name}")
    names = {name: _short(name) for name in components}
    schema_of = {id(type_): _renamed(schema, names) for type_, schema in zip(types, schemas, strict=True)}
    shown = {names[name]: _renamed(schema, names) for name, schema in sorted(components.items())}
    for name, schema in shown.items():
        _describe(name, schema)
    paths: Json = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "localrun",
            "version": localrun.__version__,
            "summary": "A local inference daemon that speaks the APIs of Ollama, OpenAI and Anthropic.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": family} for family in dict.fromkeys(operation.family.value for operation in operations)],
        "paths": paths,
        # Nobody needs a key until there is one.
        "security": [*({name: list[str]()} for name in _KEYS), {}],
        "components": {"schemas": shown, "securitySchemes": _KEYS},
    }


def _types(operations: Sequence[Operation]) -> list[Any]:
    found: dict[int, Any] = {}
    for operation in operations:
        stream = operation.stream.item if operation.stream else None
        for type_ in (operation.body, operation.answer, stream, error_type(operation.path)):
            if type_ is not None:
                found[id(type_)] = type_
    return list(found.values())


def _operation(operation: Operation, schema_of: dict[int, Json]) -> Json:
    made: Json = {"operationId": operation.id, "tags": [operation.family.value], "summary": operation.summary}
    if operation.description:
        made["description"] = operation.description
    parameters = [
        {"name": one.name, "in": one.place, "schema": dict(one.schema), "description": one.description}
        | ({"required": True} if one.is_required else {})
        for one in (*operation.parameters, *(REQUEST_HEADERS if operation.serves else ()))
    ]
    if parameters:
        made["parameters"] = parameters
    if operation.body is not None:
        content: Json = {} if operation.body is bytes else {"schema": schema_of[id(operation.body)]}
        if operation.example is not None:
            content["example"] = dict(operation.example)
        made["requestBody"] = {
            **({"description": _limit(operation)} if operation.body is not bytes else {}),
            "required": operation.is_body_required,
            "content": {operation.body_content_type: content},
        }
    made["responses"] = _responses(operation, schema_of)
    return made


def _limit(operation: Operation) -> str:
    if operation.is_text:
        return f"At most {MAX_TEXT_BYTES} bytes."
    return f"At most `max_body_bytes` of the settings, which is {Settings().max_body_bytes} unless it was changed."


def _responses(operation: Operation, schema_of: dict[int, Json]) -> Json:
    errors = {*operation.errors, *_OF_ALL}
    if operation.body is not None or operation.method in ("POST", "DELETE"):
        errors |= set(_WITH_BODY)
    if operation.serves:
        errors |= set(_WITH_MODEL)
    responses: Json = {}
    if operation.status < 400:
        responses[str(operation.status)] = _success(operation, schema_of)
        for status in operation.other_statuses:
            responses[str(status)] = {"description": "Done."}
    else:
        errors.add(operation.status)
    error_schema = schema_of[id(error_type(operation.path))]
    for status in sorted(errors):
        answer: Json = {"description": _error_description(status)}
        if operation.method != "HEAD":
            answer["content"] = {JSON: {"schema": error_schema}}
        if status == 429:
            answer["headers"] = {
                "Retry-After": {
                    "description": "Seconds, predicted",
                    "schema": {"type": "string", "pattern": "^[0-9]+$"},
                }
            }
        responses[str(status)] = answer
    return responses


def _success(operation: Operation, schema_of: dict[int, Json]) -> Json:
    content: Json = {}
    if operation.answer is not None:
        content[operation.answer_content_type] = {"schema": schema_of[id(operation.answer)]}
    if operation.stream is not None:
        content[operation.stream.content_type] = {
            # OpenAPI 3.1 has no schema for one piece of a stream; 3.2 has a field for it.
            "x-item-schema": {
                "anyOf": [schema_of[id(operation.stream.item)], schema_of[id(error_type(operation.path))]]
            }
        }
    made: Json = {"description": "Done." if operation.stream is None else operation.stream.description}
    if content:
        made["content"] = content
    if operation.serves:
        made["headers"] = ANSWER_HEADERS
    return made


def _error_description(status: int) -> str:
    codes = sorted({error.code for error in _all_errors(LocalrunError) if error.status == status} - _NEVER_SENT)
    return "Errors: " + ", ".join(f"`{code}`" for code in codes) + "."


def _all_errors(base: type[LocalrunError]) -> list[type[LocalrunError]]:
    return [base, *(found for child in base.__subclasses__() for found in _all_errors(child))]


def _short(name: str) -> str:
    """Two families' structs of the same name are told apart by their family."""
    parts = name.split(".")
    if len(parts) == 1:
        return name.lstrip("_")
    return _AREAS.get(parts[2], parts[2].capitalize()) + parts[-1].lstrip("_")


def _renamed(schema: Any, names: dict[str, str]) -> Any:
    if isinstance(schema, list):
        return [_renamed(item, names) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _REF + names[value.removeprefix(_REF)] if key == "$ref" else _renamed(value, names)
        for key, value in schema.items()
    }


def _describe(name: str, schema: Json) -> None:
    """In place: the docstring as one paragraph, and the notes of the fields."""
    if "description" in schema:
        schema["description"] = _SEE_MODULE.sub("", re.sub(r"\s+", " ", schema["description"]))
    for field, value in schema.get("properties", {}).items():
        note = note_of(name, field)
        if note:
            value["description"] = note


# Structs inside bodies whose fields are explained by their own text.
INNER = frozenset({"LoraEntry", "Options", "StreamOptions"})


@cache
def _tables() -> dict[str, dict[str, str]]:
    return tomllib.loads(
        resources.files("localrun.server.openapi").joinpath("field_notes.toml").read_text(encoding="utf-8")
    )


@cache
def notes() -> dict[str, str]:
    return {key: note for table in _tables().values() for key, note in table.items()}


@cache
def common() -> frozenset[str]:
    """What many routes take; readers look for a route's own fields first."""
    return frozenset(_tables()["service"] | _tables()["sampling"]) - {"model", "stream"}


def note_of(struct: str, field: str) -> str:
    """The note of a body's field; empty for a field of any other struct."""
    own = notes().get(f"{struct}.{field}")
    if own is not None:
        return own
    return notes().get(field, "") if struct.endswith("Body") or struct in INNER else ""
