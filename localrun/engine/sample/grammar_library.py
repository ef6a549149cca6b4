"""Grammars by llguidance, which takes a while to import.

Owner: the compiler's threads, and the worker process, which looks at a grammar before they do.
Does not: keep anything (`grammars.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits

from localrun.engine.sample.constraint import Constraint
from localrun.engine.sample.vocabulary import GrammarVocabulary
from localrun.errors import BadRequest
from localrun.wire import Grammar, GrammarKind

# What printers of JSON put between two values, and not all that JSON allows: a model that likes spaces never finishes.
WHITESPACE = r" |\n[ \t]{0,20}"
# How the daemon writes literal text of tool calls.
_LITERAL_RULE = re.compile(r"^(literal_\d+): (\".*\")$", re.MULTILINE)


def source_of(grammar: Grammar, control_ids: Callable[[str], list[tuple[str, int]]]) -> str:
    """The library's own description of a `checked` grammar (grammar_worker.py).

    `control_ids` cuts a literal into (text before, id of the control token after it); the last id is -1 for none.
    """
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": WHITESPACE})
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind is GrammarKind.GBNF:
        return LLMatcher.grammar_from_lark(grammar.text)
    return LLMatcher.grammar_from_lark(_with_control_tokens(grammar.text, control_ids))


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


_NAMES = {
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.GBNF: "GBNF grammar",
    GrammarKind.LARK: "lark grammar",
    GrammarKind.REGEX: "regular expression",
}
# The library's own, but for the items of a row: an object has four for each property that may be left out.
_LIMITS = LLParserLimits(max_items_in_row=20_000, verbose_errors=False)

# How the library ends messages that were shortened, and what it says about `oneOf`.
_CUT = "<non-verbose/>"
_ONE_OF_HINT = ". Enable 'coerce_one_of' option to approximate oneOf with anyOf"


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar at its beginning; every answer takes a copy."""

    matcher: LLMatcher
    vocabulary: GrammarVocabulary

    def constraint(
        self, *, triggers: tuple[str, ...], banned: frozenset[int], clock: Callable[[], float]
    ) -> Constraint:
        """The state of one answer. `banned` tokens are never chosen, allowed or not."""
        return Constraint(self.matcher.deep_copy(), self.vocabulary, triggers=triggers, banned=banned, clock=clock)


def problem_of(error: str) -> str:
    """The library's message for people who do not know its options."""
    return (
        error.replace(_ONE_OF_HINT, " where two alternatives may match the same value; use anyOf")
        .replace(_CUT, "")
        .strip()
    )


def compile_grammar(grammar: Grammar, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """The grammar, which was `checked` (grammar_worker.py), for this vocabulary, with what its first mask needs
    computed. Raises BadRequest if it is none, or beyond the library's limits: 500,000 symbols, 250,000 lexer states,
    and 50,000 parser items for a mask."""
    matcher = LLMatcher(vocabulary.tokenizer, source_of(grammar, vocabulary.cut), log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise BadRequest(f"the {_NAMES[grammar.kind]} cannot be used: {problem_of(matcher.get_error())}")
    return CompiledGrammar(matcher, vocabulary)
