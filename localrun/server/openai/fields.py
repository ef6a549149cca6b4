"""What chat and completions both take: choices, streaming, and the shape that an answer must have (`response_format`,
and llama-server's `json_schema` and `grammar`).

Pure. Does not: know the model, or compile a grammar (the engine does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server import structured
from localrun.server.http import fields
from localrun.server.http.fields import MaxTokens, SamplingFields
from localrun.wire import Grammar

_KINDS = "text, json_object or json_schema"


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format.json_schema`, and with `type` beside it the `text.format` of responses.

    `schema` is UNSET where it is not there: `true` and `{}` are schemas.
    """

    name: str | None = None
    schema: Any = msgspec.UNSET


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format`. `schema` beside `json_object` is llama-server's."""

    type: str = "text"
    json_schema: JsonSchema | None = None
    schema: Any = msgspec.UNSET


class FormatFields(SamplingFields, frozen=True, kw_only=True):
    """A body that says how to sample, and what shape the answer must have."""

    response_format: ResponseFormat | None = None
    json_schema: Any = None
    grammar: str | None = None

    def answer_grammar(self) -> Grammar | None:
        """None for free text. Raises BadRequest for an unknown kind, for more than one of the fields, and for what a
        grammar cannot hold an answer to."""
        asked = [name for name in ("response_format", "json_schema", "grammar") if self._asks(name)]
        if len(asked) > 1:
            raise BadRequest(f"{asked[1]}: not together with {asked[0]}; send one of them", field=asked[1])
        if self.response_format is not None and asked == ["response_format"]:
            return grammar_of_format(self.response_format)
        if self.json_schema is not None:
            return structured.json_schema(self.json_schema, field="json_schema")
        return structured.gbnf(self.grammar, field="grammar") if self.grammar else None

    def _asks(self, name: str) -> bool:
        if name == "response_format":
            return self.response_format is not None and self.response_format.type != "text"
        return getattr(self, name) not in (None, "")


def grammar_of_format(
    asked: ResponseFormat, *, path: Sequence[str] = ("response_format", "json_schema", "schema")
) -> Grammar:
    """Of a format that is not text. `path` is where its schema stands in the body."""
    if asked.type == "json_object":
        if asked.schema is msgspec.UNSET:
            return structured.json_object()
        return structured.json_schema(asked.schema, field=f"{path[0]}.schema")
    if asked.type != "json_schema":
        raise BadRequest(f"{path[0]}.type: {asked.type[:40]!r} is not known; use {_KINDS}", field=f"{path[0]}.type")
    described = asked.json_schema
    if described is None or described.schema is msgspec.UNSET:
        field = ".".join(path)
        raise BadRequest(f"{field} is required; use json_object for any object", field=field)
    return structured.json_schema(described.schema, field=".".join(path))


# Each answer is a job; this many may come of one request, whatever `n` and the number of prompts.
MAX_ANSWERS = 64

Choices = Annotated[int, Meta(ge=1, le=fields.MAX_CHOICES)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None


class CommonFields(FormatFields, frozen=True, kw_only=True):
    """What chat and completions both take."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: MaxTokens | None = None

    @property
    def n_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)
