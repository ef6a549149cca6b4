"""Graphs that are computed beside the streams, piece by piece, each in a thread of its own: those of long prompts, in a
context of their own, and those of pictures and sound (`media.py`).

A prompt is computed fastest in large batches, and a large batch is a long time without a token for everybody else. So
a graph is computed piece by piece (llama.cpp's evaluation callback), and between two pieces its thread waits while
streams are being decoded. A stream waits for one piece, some milliseconds, and not for hundreds of rows, and the batch
is as large as the kernels like it.

Between two pieces no thread is inside of the graph, so that none waits for another at a barrier: ggml's barriers spin,
and a thread that spins keeps a processor from the streams for as long as the batch is paused. For the same reason
contexts may share their threads (`library.py`).

Threads: the engine's main thread calls everything here; each `GraphThread` is inside of its native call.

Invariants: a worker's context belongs to its thread between `start` and `finish`, and to the main thread otherwise. No
two graphs of contexts are computed at once (`ComputeLock`), for they share threads. Who has the turn waits for nobody.
Does not: choose rows (`background.py`) or moments (the engine).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from localrun.engine.backend import AdapterSet, DecodeFailed, MediaRows
from localrun.engine.native.context import LlamaContext
from localrun.engine.native.library import end_team, native
from localrun.engine.native.rows import GO_ON
from localrun.engine.native.threads import PIECE_S, ComputeLock

# Of what computes beside others, so that they get the processors.
NICENESS = 10
_give_up = native.ggml_abort_callback(lambda _data: True)


class Pieces:
    """How many nodes of a graph make a piece of `PIECE_S`: learned, because nodes differ by model, batch and depth."""

    def __init__(self) -> None:
        self._n_nodes = 1.0
        self._n_asked = 0

    def is_end(self) -> bool:
        """Whether the next node of the graph is the last of its piece."""
        self._n_asked += 1
        return self._n_asked >= self._n_nodes

    def note(self, piece_s: float) -> None:
        """A piece was computed in so many seconds. Its successor is at most twice as long, or half."""
        ratio = PIECE_S / max(piece_s, 1e-6)
        self._n_nodes = max(1.0, self._n_asked * min(2.0, max(0.5, ratio)))
        self._n_asked = 0


class GraphThread:
    """A thread that does one job after another, and computes the graphs of a job in pieces, in turn with others.

    `callback` belongs into the parameters of the native context that computes them. Where `stop` says True that goes on
    after a job was given up or failed, because it was told by other means to stop; else the graph ends there, and
    nobody tells it from one that was computed: whoever has the result must look at `is_stopped`. `computed_s` is how
    long the last job computed, without pauses. See `ComputeLock` about graphs `beside` others.
    """

    def __init__(self, name: str, turns: ComputeLock, stop: Callable[[], bool], *, beside: bool = False) -> None:
        # Native code holds a bare pointer to it.
        self.callback = native.ggml_backend_sched_eval_callback(self._between_pieces)
        self.is_busy = False
        self.computed_s = 0.0
        self._turns, self._stop, self._beside = turns, stop, beside
        self._paused_s = self._piece_began_at_s = 0.0
        self._pieces = Pieces()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done = threading.Event()
        self._is_halt_wanted = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def is_stopped(self) -> bool:
        """Whether the job at hand was given up, or failed."""
        return self._is_halt_wanted or self._error is not None

    def do(self, job: Callable[[], None]) -> None:
        """Begin this; what computes a graph in it does so in `computing`."""
        assert not self.is_busy, "one job at a time"
        self.is_busy = True
        self._is_halt_wanted = False
        self._error = None
        self._done.clear()
        self._jobs.put(job)

    def is_over(self, timeout_s: float = 0.0) -> bool:
        """Whether the job is over, after waiting for that at most so long."""
        return self._done.wait(timeout_s)

    def finish(self) -> None:
        """Wait for the end of the job. Raises what it raised."""
        self._done.wait()
        self.is_busy = False
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """The job ends after the piece at hand."""
        self._is_halt_wanted = True

    def halt(self) -> None:
        """Give the job up, and wait for that."""
        self.give_up()
        self._done.wait()
        self.is_busy = False

    def close(self) -> None:
        """End the thread."""
        if self.is_busy:
            self.halt()
        self._jobs.put(None)
        self._thread.join()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """This thread: it computes graphs inside of this."""
        self._turns.take(beside=self._beside)
        began_at_s = self._piece_began_at_s = time.perf_counter()
        self._paused_s = 0.0
        try:
            yield
        finally:
            self.computed_s = time.perf_counter() - began_at_s - self._paused_s
            self._turns.leave(beside=self._beside)

    def _serve(self) -> None:
        """This thread."""
        if self._beside and sys.platform == "linux":  # where a thread, and those that it starts, have one of their own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._error = self._error or error
            del job
            end_team()
            self._done.set()
            self._turns.ring()

    def _between_pieces(self, _tensor: object, is_question: bool, _data: object) -> bool:
        """This thread, from native code: whether a piece ends with this node, and then, once it was computed."""
        if is_question:
            return self.is_busy and self._pieces.is_end()  # else it is a step's graph, which nothing interrupts
        try:
            self._end_piece()
        except Exception as error:
            # ctypes would print it and go on with half of a graph.
            self._error = DecodeFailed(f"computing failed between two pieces: {error!r}", is_fatal=True)
        goes_on = not self.is_stopped or self._stop()
        self._piece_began_at_s = time.perf_counter()
        return goes_on

    def _end_piece(self) -> None:
        """Wait if others want to compute."""
        ended_at_s = time.perf_counter()
        self._pieces.note(ended_at_s - self._piece_began_at_s)
        if self._turns.is_wanted(beside=self._beside):
            self._turns.leave(beside=self._beside)
            self._turns.take(beside=self._beside)
            self._paused_s += time.perf_counter() - ended_at_s


class LlamaWorker(GraphThread):
    """Computes long prompts: see the module and `background.Worker`. `open_context` makes the context, with this
    evaluation callback."""

    def __init__(self, open_context: Callable[[Any], LlamaContext], first_seq: int, turns: ComputeLock) -> None:
        super().__init__("background", turns, self._abort_next)
        try:
            self.context = open_context(self.callback)
        except Exception:
            super().close()
            raise
        self.batch, self.n_seqs, self.first_seq = self.context.batch, self.context.n_seqs - 1, first_seq
        self.batch.first_seq = first_seq

    def use(self, adapters: AdapterSet) -> None:
        assert not self.is_busy, "its context is computing"
        self.context.use(adapters)

    def start(self, n_rows: int) -> None:
        self.context.check_rows(n_rows)
        end_team()
        self.do(lambda: self._compute(lambda: self.context.decode(n_rows)))

    def start_media(self, part: MediaRows) -> None:
        own = part._replace(seq=part.seq - self.first_seq)
        self.context.check_media(own)
        self.do(lambda: self._compute(lambda: self.context.decode_media(own)))

    def is_finite(self, row: int) -> bool:
        return self.context.is_finite(row)

    def close(self) -> None:
        """End the thread and free the context."""
        super().close()
        self.context.close()

    def _compute(self, decode: Callable[[], None]) -> None:
        """Worker thread."""
        try:
            with self.computing():
                decode()
        finally:
            if self.is_stopped:
                native.llama_set_abort_callback(self.context.native, GO_ON, None)

    def _abort_next(self) -> bool:
        """Worker thread. A graph that stops here would pass for one that was computed; the next operation gives up
        instead."""
        native.llama_set_abort_callback(self.context.native, _give_up, None)
        return True
