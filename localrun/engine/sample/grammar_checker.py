"""A grammar is looked at in a process of its own first: the engine's end of `grammar_worker.py`.

Owner: one thread at a time calls `check`, which blocks; `kill` may be called by any. Most engines never see
a grammar, so the worker is started by the first one, and ends by itself when there is nothing to do.
Does not: choose whose grammar is next (`grammars.py`).
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO, ClassVar, cast

from localrun import framing
from localrun.errors import BadRequest
from localrun.processes import HIDDEN
from localrun.wire import Grammar, GrammarCheck, GrammarChecked

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
    """See the module. Workers are the process's, not an engine's: a worker that is idle serves whoever is next."""

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
