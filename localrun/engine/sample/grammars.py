"""Grammars beside the steps: compiling them, who waits for one, and drawing tokens that take long.

Owner: the engine's main thread; the work is in threads.
Does not: know the grammar library (`grammar_library.py`), decide what is slow (`constraint.py`), or end a request.
"""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, TypeVar, cast

from localrun import framing
from localrun.engine.backend import Backend, Logprobs
from localrun.engine.request import Request
from localrun.engine.sample.constraint import Constraint
from localrun.errors import BadRequest, EngineFailed, LocalrunError
from localrun.processes import HIDDEN
from localrun.wire import Grammar, GrammarCheck, GrammarChecked, GrammarKind, Submit

# Of the processor's time, which is what a worker limits itself to; where it cannot, or gets no processor, of the clock.
COMPILE_LIMIT_S = 10
_LONGEST_S = 60.0
# By the clock: real schemas take some milliseconds, and a busy machine takes its time.
SLOW_S = 1.0
TOO_LARGE = "the grammar takes more memory, or is nested more deeply, than it may; make it smaller"
_COMMAND = (sys.executable, "-P", "-m", "localrun.engine.sample.grammar_worker")
_OVERRAN = -signal.SIGXCPU if sys.platform != "win32" else None


class NobodyWaits(Exception):
    """Whoever wanted the grammar has left."""


class GrammarChecker:
    """A grammar is looked at in a process of its own first: this is the engine's end of `grammar_worker.py`.

    Workers are the process's, not an engine's: a worker that is idle serves whoever is next. Most engines never see a
    grammar, so the worker is started by the first one, and ends by itself when there is nothing to do.

    Owner: one thread at a time calls `check`, which blocks; `kill` may be called by any."""

    _idle: ClassVar[list[GrammarChecker]] = []

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._asked_s: float | None = None

    @property
    def is_slow(self) -> bool:
        """Whether what is checked now takes long."""
        asked_s = self._asked_s
        return asked_s is not None and time.monotonic() - asked_s > SLOW_S

    @classmethod
    def borrowed(cls) -> GrammarChecker:
        """One that nobody else has until it is given back."""
        return cls._idle.pop() if cls._idle else cls()

    def give_back(self) -> None:
        self._idle.append(self)

    def check(self, grammar: Grammar, control_names: tuple[str, ...], is_left: Callable[[], bool]) -> GrammarChecked:
        """With the grammar as it is to be compiled, which then neither crashes nor hangs. Raises BadRequest for one
        that cannot be, or takes more time, memory or stack than it may; NobodyWaits when it was killed for
        `is_left`."""
        request = framing.encode(GrammarCheck(grammar=grammar, control_names=control_names, cpu_s=COMPILE_LIMIT_S))
        # Once more, since a worker may also end because it was idle, or because somebody ended it.
        for _ in range(2):
            reply = self._asked(request, is_left)
            if reply is None:
                continue
            if reply.grammar is None:
                raise BadRequest(reply.error_message)
            return reply
        raise BadRequest(TOO_LARGE)

    def start(self) -> None:
        """Have a worker, which may take a while to be ready."""
        if self._worker is None or self._worker.poll() is not None:
            self._discard()
            self._worker = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=-1, **HIDDEN
            )
            self._is_ready = False

    def kill(self) -> None:
        """End what is being checked."""
        if self._worker is not None:
            self._worker.kill()

    def _discard(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            with contextlib.suppress(OSError), worker:  # closing writes what it never read
                worker.kill()

    def _asked(self, request: bytes, is_left: Callable[[], bool]) -> GrammarChecked | None:
        """The worker's reply; None when it died of something else than its time. Raises as `check` does."""
        self.start()
        worker = self._worker
        assert worker is not None
        assert worker.stdin is not None
        if is_left():
            raise NobodyWaits
        timer = threading.Timer(_LONGEST_S, worker.kill)
        timer.start()
        try:
            if not self._is_ready:
                self._is_ready = self._read(worker) is not None
            self._asked_s = time.monotonic()
            worker.stdin.write(request)
            worker.stdin.flush()
            if (reply := self._read(worker)) is not None:
                return reply
        except (OSError, framing.FrameError):
            pass
        finally:
            self._asked_s = None
            was_late = timer.finished.is_set()
            timer.cancel()
        returncode = worker.wait()
        if is_left():
            raise NobodyWaits
        if was_late or returncode == _OVERRAN:
            raise BadRequest(f"the grammar takes more than {COMPILE_LIMIT_S} s to compile; make it smaller")
        return None

    def _read(self, worker: subprocess.Popen[bytes]) -> GrammarChecked | None:
        assert worker.stdout is not None
        body = framing.read_body(cast(BinaryIO, worker.stdout))
        return None if body is None else framing.decode_from_grammar_worker(body)


if TYPE_CHECKING:
    from localrun.engine.sample.grammar_library import CompiledGrammar, GrammarVocabulary

# To compile, and to draw: a second one, so that a grammar that takes long does not keep the others waiting.
_THREADS = 2
_CACHED_GRAMMARS = 64
# Long enough for those who wait for the interpreter's lock to get it.
_PAUSE_S = 0.02
# Nobody tells that a grammar has become a slow one.
LOOK_S = 0.1
# Twice what the worker has, which has compiled the same without overflowing it.
_STACK_BYTES = 32 * 1024 * 1024

_T = TypeVar("_T")


@dataclass(eq=False)
class Compiling:
    """A grammar that is compiled for `client`, and for all who ask for the same one; `n_wanting` wait for it. It has a
    `checker` while a thread has it, which gives it back if it is put off; `notices` say what was left out of it."""

    grammar: Grammar
    client: str
    n_wanting: int = 0
    checker: GrammarChecker | None = None
    is_slow: bool = False
    is_put_off: bool = False
    notices: tuple[str, ...] = ()
    future: Future[CompiledGrammar] = field(default_factory=Future)


class GrammarCompiler:
    """Compiles grammars beside the step loop, and keeps them.

    A grammar is compiled once for all requests with the same kind and text, in one of two threads: first in a process
    of its own, which it may crash or hang (`GrammarChecker`), and what has passed here, where the library works
    without the interpreter's lock. Clients take turns. One thread at most has a slow grammar, and what turns out to be
    slow while there is one is put off, so nobody's quick grammars wait for slow ones. What nobody wants any more is
    given up.

    Owner: the engine's main thread calls; the work is in the threads.
    Does not: wait for anybody.
    """

    def __init__(self, backend: Backend, ring: Callable[[], None]) -> None:
        self._backend = backend
        self._ring = ring
        self._threads: ThreadPoolExecutor | None = None
        self._vocabulary: Future[GrammarVocabulary] | None = None
        self._cache: OrderedDict[tuple[GrammarKind, str], Compiling] = OrderedDict()
        # Of slow ones or not, and of each client, in order of coming; a line that had its turn goes behind all others.
        self._lines: OrderedDict[tuple[bool, str], deque[Compiling]] = OrderedDict()
        self._running: list[Compiling] = []

    def compile(self, grammar: Grammar, client: str) -> Compiling:
        """The grammar, now or later; its future raises BadRequest if it is none."""
        key = (grammar.kind, grammar.text)
        if key not in self._cache:
            if self._threads is None or self._vocabulary is None:
                self._threads = ThreadPoolExecutor(_THREADS, "grammar")
                self._vocabulary = self._submit(_read_vocabulary, self._backend)
            self._cache[key] = compiling = Compiling(grammar, client)
            self._put_in_line(compiling)
            settled = [key for key, each in self._cache.items() if each.future.done()]
            for key_of_old in settled[: max(0, len(self._cache) - _CACHED_GRAMMARS)]:
                del self._cache[key_of_old]
        self._cache.move_to_end(key)
        found = self._cache[key]
        found.n_wanting += 1
        self.go_on()
        return found

    def leave(self, compiling: Compiling) -> None:
        """One of those who want it does not any more."""
        compiling.n_wanting -= 1
        if compiling.n_wanting or compiling.future.done():
            return
        del self._cache[compiling.grammar.kind, compiling.grammar.text]
        if compiling in self._running:
            if (checker := compiling.checker) is not None:
                checker.kill()
            return
        line = compiling.is_slow, compiling.client
        self._lines[line].remove(compiling)
        if not self._lines[line]:
            del self._lines[line]

    def go_on(self) -> None:
        """Begins what there are threads for."""
        self._running = [each for each in self._running if not each.future.done() and not self._is_back(each)]
        for each in self._running:
            checker = each.checker
            if checker is not None and checker.is_slow and not each.is_slow and not each.is_put_off:
                if self._has_slow:
                    each.is_put_off = True
                    checker.kill()
                else:
                    each.is_slow = True
        while len(self._running) < _THREADS:
            busy = {(each.is_slow, each.client) for each in self._running}
            free = (line for line in self._lines if line not in busy and not (line[0] and self._has_slow))
            key = next(free, None)
            if key is None:
                return
            line = self._lines.pop(key)
            compiling = line.popleft()
            if line:
                self._lines[key] = line
            assert self._vocabulary is not None
            compiling.checker = GrammarChecker.borrowed()
            self._submit(_compile, compiling, self._vocabulary).add_done_callback(lambda _: self._ring())
            self._running.append(compiling)

    @property
    def has_line(self) -> bool:
        """Whether some wait for a thread, and so for what turns out to be slow (`go_on`)."""
        return bool(self._lines)

    @property
    def _has_slow(self) -> bool:
        return any(each.is_slow for each in self._running)

    def _is_back(self, compiling: Compiling) -> bool:
        """Whether its thread gave it back, so that it is in line again, if anybody wants it."""
        if compiling.checker is not None:
            return False
        compiling.is_slow, compiling.is_put_off = True, False
        if compiling.n_wanting:
            self._put_in_line(compiling)
        return True

    def _put_in_line(self, compiling: Compiling) -> None:
        self._lines.setdefault((compiling.is_slow, compiling.client), deque()).append(compiling)

    def close(self) -> None:
        """End the threads; what is under way is given up."""
        for compiling in self._running:
            compiling.n_wanting = 0
            if compiling.checker is not None:
                compiling.checker.kill()
        if self._threads is not None:
            self._threads.shutdown()  # of what has not begun too, which gives its checker back

    def _submit(self, work: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """In a thread, which has more stack than what has passed has needed."""
        assert self._threads is not None
        usual_bytes = threading.stack_size(_STACK_BYTES)
        try:
            return self._threads.submit(work, *arguments)
        finally:
            threading.stack_size(usual_bytes)


# The library is imported in a thread: it takes 25 ms, and most engines never need it.


def _read_vocabulary(backend: Backend) -> GrammarVocabulary:
    from localrun.engine.sample.grammar_library import GrammarVocabulary

    return GrammarVocabulary(backend, lambda: time.sleep(_PAUSE_S))


def _compile(compiling: Compiling, vocabulary: Future[GrammarVocabulary]) -> None:
    from localrun.engine.sample.grammar_library import compile_grammar

    checker = compiling.checker
    assert checker is not None
    try:
        if not compiling.n_wanting:
            raise NobodyWaits
        checker.start()  # while the vocabulary is read
        grammar, names = compiling.grammar, vocabulary.result().names_in(compiling.grammar.text)
        checked = checker.check(grammar, names, lambda: compiling.is_put_off or not compiling.n_wanting)
        assert checked.grammar is not None
        compiling.notices = checked.notices
        compiling.future.set_result(compile_grammar(checked.grammar, vocabulary.result()))
    except BaseException as error:
        if isinstance(error, NobodyWaits) and compiling.n_wanting:
            compiling.checker = None
        else:
            compiling.future.set_exception(error)
    # Only now: until the future is done whoever gives the grammar up kills the worker.
    checker.give_back()


@dataclass
class _Entry:
    request: Request
    submit: Submit
    grammar: Grammar
    compiling: Compiling


class GrammarQueue:
    """Requests whose grammar is being compiled: they wait in the queue, and others pass them. What is compiled `ring`s.

    Owner: the engine's main thread.
    Does not: compile, or end a request.
    """

    def __init__(self, backend: Backend, ring: Callable[[], None]) -> None:
        self._eog_tokens = backend.eog_tokens
        self._compiler = GrammarCompiler(backend, ring)
        self.entries: list[_Entry] = []

    @property
    def look_again_s(self) -> float:
        """When to ask what became ready, though nothing rang."""
        return LOOK_S if self._compiler.has_line else math.inf

    def add(self, request: Request, submit: Submit, grammar: Grammar) -> None:
        """A new request, which waits for its grammar."""
        request.awaits_grammar = True
        self.entries.append(_Entry(request, submit, grammar, self._compiler.compile(grammar, submit.client)))

    def collect(self) -> list[tuple[Request, LocalrunError | None, tuple[str, ...]]]:
        """Give compiled grammars to their requests. Returns those that have theirs now, or why they never will, and
        what was left out."""
        settled: list[tuple[Request, LocalrunError | None, tuple[str, ...]]] = []
        self._compiler.go_on()
        for entry in [entry for entry in self.entries if entry.compiling.future.done()]:
            self._leave(entry)
            settled.append((entry.request, self._take(entry), entry.compiling.notices))
        return settled

    def drop(self, request: Request) -> None:
        """The request is over."""
        for entry in [entry for entry in self.entries if entry.request is request]:
            self._leave(entry)

    def close(self) -> None:
        """End the threads."""
        self._compiler.close()

    def _leave(self, entry: _Entry) -> None:
        self.entries.remove(entry)
        self._compiler.leave(entry.compiling)

    def _take(self, entry: _Entry) -> LocalrunError | None:
        problem = entry.compiling.future.exception()
        if problem is not None:
            failed = EngineFailed(f"the grammar cannot be compiled: {problem!r}")
            return problem if isinstance(problem, LocalrunError) else failed
        banned = {token for token, bias in entry.submit.sampling.logit_bias if bias == -math.inf}
        if entry.submit.ignore_eos:
            banned |= self._eog_tokens
        constraint = Constraint(
            entry.compiling.future.result(),
            triggers=entry.grammar.triggers,
            has_mentions=entry.grammar.has_mentions,
            banned=frozenset(banned),
            clock=time.thread_time,
        )
        try:
            constraint.begin(entry.grammar.begun)
        except BadRequest as error:
            return error
        constraint.accept(entry.request.output)
        entry.request.constraint = constraint
        entry.request.sampler.constrain(constraint)
        entry.request.awaits_grammar = False
        return None


class LateRows:
    """Draws the tokens of slow grammars, beside the steps instead of inside one.

    Such a row is copied and sampled in a thread, which then `ring`s. Its request keeps its cells and takes no part in
    steps until its token is there; the others go on. What is wanted of its log-probabilities is read from a copy, too.

    Owner: the engine's main thread; a request's sampler belongs to the thread until `collect` or `finish` gives it
    back.
    Does not: decide what is slow (`constraint.py`), or what follows from a token.
    """

    def __init__(self, backend: Backend, ring: Callable[[], None]) -> None:
        self._backend = backend
        self._ring = ring
        self._threads: ThreadPoolExecutor | None = None
        self.rows: dict[Request, tuple[Future[int], Logprobs | None]] = {}

    def postpone(self, request: Request, row: int) -> None:
        """Have the next token of a request drawn beside the steps."""
        self._threads = self._threads or ThreadPoolExecutor(_THREADS, "late")
        logprobs = None if request.n_probs is None else self._backend.hold_logprobs(row)
        self.rows[request] = token, logprobs = self._threads.submit(request.sampler.hold(row)), logprobs
        token.add_done_callback(lambda _: self._ring())
        request.skips_steps = True

    def collect(self) -> list[tuple[Request, int, Logprobs | None]]:
        """The tokens that are there now, and their rows where log-probabilities are wanted."""
        there = [request for request, (token, _) in self.rows.items() if token.done()]
        return [(request, *self.finish(request)) for request in there]

    def finish(self, request: Request) -> tuple[int, Logprobs | None]:
        """The token of a late request, which is waited for if need be, and its row as in `collect`."""
        request.skips_steps = False
        token, logprobs = self.rows.pop(request)
        return token.result(), logprobs

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()
