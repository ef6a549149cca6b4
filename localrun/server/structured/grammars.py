"""Grammars from what a client sent: JSON, a JSON schema, GBNF, lark, a regular expression.

Pure. Does not: compile.
"""

from __future__ import annotations

from typing import Any

from localrun.errors import BadRequest
from localrun.server.structured.schema_check import schema_text
from localrun.wire import Grammar, GrammarKind

# Beyond this a text is no grammar that somebody wrote for an answer.
MAX_GRAMMAR_BYTES = 256 * 1024


def json_object() -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"}, field="format")


def json_schema(schema: Any, *, field: str) -> Grammar:
    """A JSON value that `schema` (parsed JSON) describes. Raises BadRequest naming an unsupported keyword and its path
    below `field`."""
    return _written(GrammarKind.JSON_SCHEMA, schema_text(schema, field=field), field)


def gbnf(text: str, *, field: str) -> Grammar:
    """A grammar in llama.cpp's notation. Its rules are checked when the engine compiles it. Raises BadRequest."""
    return _written(GrammarKind.GBNF, text, field)


def lark(text: str, *, field: str) -> Grammar:
    """A grammar in lark notation, `start` being its first rule. Raises BadRequest."""
    return _written(GrammarKind.LARK, text, field)


def regex(text: str, *, field: str) -> Grammar:
    """A regular expression that the whole answer must match. Raises BadRequest."""
    return _written(GrammarKind.REGEX, text, field)


def _written(kind: GrammarKind, text: str, field: str) -> Grammar:
    if not text.strip():
        raise BadRequest(f"{field} is empty; leave it out for a free answer", field=field)
    size_bytes = len(text.encode("utf-8", "replace"))
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise BadRequest(f"{field} has {size_bytes} bytes; the limit is {MAX_GRAMMAR_BYTES}", field=field)
    return Grammar(kind, text)
