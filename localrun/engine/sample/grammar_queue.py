"""Requests whose grammar is being compiled: they wait in the queue, and others pass them.

Owner: the engine's main thread. Time is passed in.
Does not: compile (`grammar_compiler.py`), or end a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrun.engine.backend import Backend
from localrun.engine.request import Request
from localrun.engine.sample.grammar_compiler import GrammarCompiler
from localrun.errors import BadRequest, EngineFailed, LocalrunError
from localrun.wire import Submit

if TYPE_CHECKING:
    from localrun.engine.sample.grammar_library import Compiled

# A request whose grammar is not ready after this is refused.
COMPILE_LIMIT_S = 10.0
# How long to sleep when there is nothing else to do; a cancel may come in the meantime.
_WAIT_S = 0.005


@dataclass(frozen=True)
class _Entry:
    request: Request
    submit: Submit
    compiling: Future[Compiled]
    late_at_s: float


class GrammarQueue:
    """See the module."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._eog_tokens = backend.eog_tokens
        self._compiler = GrammarCompiler(backend)
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, submit: Submit, now_s: float) -> None:
        """A new request, which waits for its grammar if it has one."""
        if submit.grammar is not None:
            request.awaits_grammar = True
            compiling = self._compiler.compile(submit.grammar)
            self._entries.append(_Entry(request, submit, compiling, now_s + COMPILE_LIMIT_S))

    def settle(self, now_s: float) -> list[tuple[Request, LocalrunError]]:
        """Give compiled grammars to their requests. Returns those that will never have one, and why."""
        failed: list[tuple[Request, LocalrunError]] = []
        for entry in list(self._entries):
            if entry.compiling.done():
                self._entries.remove(entry)
                error = self._take(entry)
            elif now_s >= entry.late_at_s:
                self._entries.remove(entry)
                error = BadRequest(f"the grammar takes more than {COMPILE_LIMIT_S:.0f} s to compile; make it smaller")
            else:
                continue
            if error is not None:
                failed.append((entry.request, error))
        return failed

    def drop(self, request: Request) -> None:
        """The request is over."""
        self._entries = [entry for entry in self._entries if entry.request is not request]

    def wait(self) -> None:
        """Sleep a little, or until a grammar is compiled; not at all when nobody waits for one."""
        if self._entries:
            wait([entry.compiling for entry in self._entries], _WAIT_S, FIRST_COMPLETED)

    def close(self) -> None:
        """End the threads."""
        self._compiler.close()

    def _take(self, entry: _Entry) -> LocalrunError | None:
        grammar = entry.submit.grammar
        assert grammar is not None
        problem = entry.compiling.exception()
        if problem is not None:
            failed = EngineFailed(f"the grammar cannot be compiled: {problem!r}")
            return problem if isinstance(problem, LocalrunError) else failed
        banned = {token for token, bias in entry.submit.sampling.logit_bias if bias == -math.inf}
        if entry.submit.ignore_eos:
            banned |= self._eog_tokens
        constraint = entry.compiling.result().constraint(
            triggers=grammar.triggers, banned=frozenset(banned), clock=self._clock
        )
        entry.request.constraint = constraint
        entry.request.sampler.constrain(constraint)
        entry.request.awaits_grammar = False
        return None
