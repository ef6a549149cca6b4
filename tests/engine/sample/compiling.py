"""A grammar by the way of those of clients: looked at by what the worker runs, then compiled for a vocabulary."""

from __future__ import annotations

from localrun.engine.sample.grammar_library import CompiledGrammar, GrammarVocabulary
from localrun.engine.sample.grammar_library import compile_grammar as compile_checked
from localrun.engine.sample.grammar_worker import checked
from localrun.wire import Grammar


def compile_grammar(grammar: Grammar, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """Raises BadRequest as the worker and the engine do."""
    found = checked(grammar, vocabulary.names_in(grammar.text)).grammar
    assert found is not None
    return compile_checked(found, vocabulary)
