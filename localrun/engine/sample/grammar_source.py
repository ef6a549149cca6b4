"""From a request's grammar to the text that the grammar library compiles.

Does not: compile (`grammar_compiler.py`), or know which keywords a JSON schema may have (the daemon refuses others).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from llguidance import LLMatcher

from localrun.engine.sample import gbnf
from localrun.errors import BadRequest
from localrun.wire import Grammar, GrammarKind

# What printers of JSON put between two values, and not all that JSON allows: a model that likes spaces never finishes.
_WHITESPACE = r" |\n[ \t]{0,20}"
# How the daemon writes literal text of tool calls.
_LITERAL_RULE = re.compile(r"^(literal_\d+): (\".*\")$", re.MULTILINE)


def source_of(grammar: Grammar, control_ids: Callable[[str], list[tuple[str, int]]]) -> str:
    """The library's own description of `grammar`. Raises BadRequest for a text that it cannot be made of.

    `control_ids` cuts a literal into (text before, id of the control token after it); the last id is -1 for none.
    """
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(_schema(grammar.text), overrides={"whitespace_pattern": _WHITESPACE})
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind is GrammarKind.GBNF:
        return LLMatcher.grammar_from_lark(gbnf.to_lark(grammar.text))
    return LLMatcher.grammar_from_lark(_with_control_tokens(grammar.text, control_ids))


def _schema(text: str) -> str:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the JSON schema cannot be read: {error}") from error
    return text


def _with_control_tokens(lark: str, control_ids: Callable[[str], list[tuple[str, int]]]) -> str:
    """In rules named for literals, the name of a control token stands for that token."""

    def expand(found: re.Match[str]) -> str:
        parts: list[str] = []
        for before, token in control_ids(json.loads(found[2])):
            if before:
                parts.append(json.dumps(before, ensure_ascii=False))
            if token >= 0:
                parts.append(f"<[{token}]>")
        return f"{found[1]}: {' '.join(parts)}"

    return _LITERAL_RULE.sub(expand, lark)
