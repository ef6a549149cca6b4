"""Grammars by llguidance: the only module with `grammar_source.py` and `grammar_vocabulary.py` that imports it.

Owner: the compiler's threads; importing it takes a while.
Does not: keep anything (`grammar_compiler.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits

from localrun.engine.sample.constraint import Constraint
from localrun.engine.sample.grammar_source import source_of
from localrun.engine.sample.grammar_vocabulary import GrammarVocabulary
from localrun.errors import BadRequest
from localrun.wire import Grammar, GrammarKind

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
class Compiled:
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


def compile_grammar(grammar: Grammar, vocabulary: GrammarVocabulary) -> Compiled:
    """The grammar for this vocabulary, with what its first mask needs computed. Raises BadRequest if it is none, or
    beyond the library's limits: 500,000 symbols, 250,000 lexer states, and 50,000 parser items for a mask."""
    source = source_of(grammar, vocabulary.cut)
    matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise BadRequest(f"the {_NAMES[grammar.kind]} cannot be used: {problem_of(matcher.get_error())}")
    return Compiled(matcher, vocabulary)
