"""Compiles grammars beside the step loop, and keeps them.

A grammar is compiled once for all requests with the same kind and text, in one of two threads; the library works
without the interpreter's lock, and within limits of its own for time and memory.

Owner: the engine's main thread calls; the work is in the threads.
Does not: wait for anybody, or read the clock.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from localrun.engine.backend import Backend
from localrun.wire import Grammar, GrammarKind

if TYPE_CHECKING:
    from localrun.engine.sample.grammar_library import Compiled
    from localrun.engine.sample.grammar_vocabulary import GrammarVocabulary

# A second one, so that a grammar that takes long does not keep the others waiting.
_THREADS = 2
_CACHED_GRAMMARS = 64
# Long enough for those who wait for the interpreter's lock to get it.
_PAUSE_S = 0.02


class GrammarCompiler:
    """See the module."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._threads: ThreadPoolExecutor | None = None
        self._vocabulary: Future[GrammarVocabulary] | None = None
        self._cache: OrderedDict[tuple[GrammarKind, str], Future[Compiled]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Future[Compiled]:
        """The grammar, now or later; the future raises BadRequest if it is none."""
        key = (grammar.kind, grammar.text)
        if key not in self._cache:
            if self._threads is None or self._vocabulary is None:
                self._threads = ThreadPoolExecutor(_THREADS, "grammar")
                self._vocabulary = self._threads.submit(_read_vocabulary, self._backend)
            self._cache[key] = self._threads.submit(_compile, grammar, self._vocabulary)
            while len(self._cache) > _CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return self._cache[key]

    def close(self) -> None:
        """End the threads; what they have not begun is dropped."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)


# The library is imported in a thread: it takes 25 ms, and most engines never need it.


def _read_vocabulary(backend: Backend) -> GrammarVocabulary:
    from localrun.engine.sample.grammar_vocabulary import GrammarVocabulary

    return GrammarVocabulary(backend, lambda: time.sleep(_PAUSE_S))


def _compile(grammar: Grammar, vocabulary: Future[GrammarVocabulary]) -> Compiled:
    from localrun.engine.sample.grammar_library import compile_grammar

    return compile_grammar(grammar, vocabulary.result())
