"""The Jinja that chat templates are written for, in a sandbox.

Follows what the `transformers` library gives its templates: `trim_blocks` and `lstrip_blocks`, `break` and `continue`,
`tojson` without HTML escaping, `raise_exception`, `strftime_now`, the `generation` tag, and undefined names that print
as nothing. Data passed in, which is a copy, can be changed by `append` and `pop` alone; an attribute that starts with
an underscore is an error.

Owner: the template worker. Does not: bound time or memory (the worker and the daemon do).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

COMPILED_TEMPLATES = 32


class TemplateRefusalError(Exception):
    """The template called `raise_exception`: the conversation has a shape that the model does not know."""


class OutputTooLargeError(Exception):
    """The prompt grew beyond its limit."""


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; for inference it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Kimi's template keeps a list of its own. What is passed in is this render's copy, so no harm is done to it.
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # The base class prints nothing for a forbidden attribute and objects only when it is used. Forbidden attributes
        # have no honest use; methods that change data do (`x.update is defined`), so those stay as they are.
        if attribute.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")
        return super().unsafe_undefined(obj, attribute)


def render(template: str, variables: dict[str, Any], output_bytes: int) -> str:
    """The rendered text.

    Stops as soon as it exceeds `output_bytes` of UTF-8, by OutputTooLargeError. Raises TemplateRefusalError for the
    template's own `raise_exception`, and whatever else Jinja or the template's expressions raise.
    """
    pieces: list[str] = []
    size_bytes = 0
    for piece in _pieces(template, variables):
        size_bytes += len(piece) if piece.isascii() else len(piece.encode())
        if size_bytes > output_bytes:
            raise OutputTooLargeError
        pieces.append(piece)
    return "".join(pieces)


def _pieces(template: str, variables: dict[str, Any]) -> Iterator[str]:
    return _compiled(template).generate(variables)


@lru_cache(maxsize=COMPILED_TEMPLATES)
def _compiled(template: str) -> jinja2.Template:
    return _environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed
    )


def _listed(value: Any) -> list[Any]:
    """`tools | map(attribute="function") | tojson`: Jinja's filters give generators."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _raise_exception(message: object = "the template refused the messages") -> None:
    raise TemplateRefusalError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _new_environment() -> _ChatEnvironment:
    environment = _ChatEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]  # random filler text: no template needs it, and it hands out a Python function
    return environment


_environment = _new_environment()
