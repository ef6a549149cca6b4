"""Arguments that a model wrote as bare text, given the type that the tool's schema says.

XML-like formats write `<parameter=count>3</parameter>`: only the schema tells whether that is a number or a text.

Pure. Does not: validate; a text that is no number where a number is wanted stays a text, for the tool to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localrun.server.replies import json_text
from localrun.server.replies.source import MalformedError

_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def typed(text: str, name: str, parameters: Mapping[str, Any]) -> Any:
    """The value of the parameter `name` written as `text`.

    A parameter whose schema allows texts alone is taken as it stands; any other as JSON if it is that, and of an
    allowed type where there also are texts.
    """
    allowed = _types(_property(name, parameters), parameters)
    if allowed == {"string"}:
        return text
    stripped = text.strip()
    if stripped in _PYTHON_WORDS:
        value: Any = _PYTHON_WORDS[stripped]
    else:
        try:
            value = json_text.parse(stripped)
        except MalformedError:
            return text
    return text if "string" in allowed and not (_type_names(value) & allowed) else value


def _property(name: str, parameters: Mapping[str, Any]) -> Any:
    properties = parameters.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Names of the JSON types that a schema allows; empty when it does not say."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {item for item in kind if isinstance(item, str)}
    if "const" in schema:
        return _type_names(schema["const"])
    if isinstance(schema.get("enum"), list):
        return set().union(*(_type_names(item) for item in schema["enum"]))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, depth + 1)
    choices = [choice for key in ("anyOf", "oneOf", "allOf") for choice in schema.get(key) or ()]
    return set().union(*(_types(choice, root, depth + 1) for choice in choices))


def _type_names(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    if value is None:
        return {"null"}
    return {"string"} if isinstance(value, str) else {"array"} if isinstance(value, list) else {"object"}
