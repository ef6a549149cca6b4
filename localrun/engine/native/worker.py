"""Computes long prompts in a context of their own, in a thread of their own, in a way that can be paused.

A prompt is computed fastest in large batches, and a large batch is a long time without a token for everybody else. So
the graph of a batch is computed piece by piece (llama.cpp's evaluation callback), and between two pieces the worker
waits while streams are being decoded. A stream waits for one piece, some milliseconds, and not for hundreds of rows,
and the batch is as large as the kernels like it.

Between two pieces no thread is inside of the graph, so that none waits for another at a barrier: ggml's barriers spin,
and a thread that spins keeps a processor from the streams for as long as the batch is paused. For the same reason both
contexts may share their threads (`library.py`).

Two threads: the engine's main thread calls everything here, the *worker* is inside `llama_decode`.

Invariants: the context belongs to the worker between `start` and `finish`, and to the main thread otherwise. Who pauses
resumes: nothing else waits for anything.
Does not: choose rows (`background.py`) or moments (the engine).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from localrun.engine.backend import DecodeFailed
from localrun.engine.native.context import LlamaContext
from localrun.engine.native.library import native

# A piece takes about this long: cutting costs some 20 us, and streams wait for half a piece on average.
PIECE_S = 0.004
_go_on = native.ggml_abort_callback()
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


class LlamaWorker:
    """See the module and `background.Worker`. `open_context` makes the context, with this evaluation callback."""

    def __init__(self, open_context: Callable[[Any], LlamaContext], first_seq: int) -> None:
        # Native code holds a bare pointer to it.
        self._callback = native.ggml_backend_sched_eval_callback(self._between_pieces)
        self.context = open_context(self._callback)
        self.batch, self.n_seqs, self.first_seq = self.context.batch, self.context.n_seqs, first_seq
        self.computed_s = self._paused_s = 0.0
        self._pieces = Pieces()
        self._piece_began_at_s = 0.0
        self.is_busy = False
        self._work: SimpleQueue[int | None] = SimpleQueue()
        self._done = threading.Event()
        self._paused = threading.Event()
        # Held while a batch ends and while one begins: a late "paused" of the one would answer for the other.
        self._ending = threading.Lock()
        # One for each answer to a pause. With a flag a worker that is slow to look would sleep through it, for ever.
        self._may_run = threading.Semaphore(0)
        self._is_pause_wanted = False
        self._is_halt_wanted = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="background", daemon=True)
        self._thread.start()

    def start(self, n_rows: int) -> None:
        assert not self.is_busy, "one batch at a time"
        batch = self.batch
        if batch.wants_logits[: max(0, n_rows)].any():
            raise ValueError("the background computes no logits")
        batch.seq[: max(0, n_rows)] -= self.first_seq
        self.context.check_rows(n_rows)
        self.is_busy = True
        self._is_halt_wanted = False
        self._error = None
        with self._ending:
            self._done.clear()
        self._work.put(n_rows)

    def is_over(self, timeout_s: float = 0.0) -> bool:
        return self._done.wait(timeout_s)

    def finish(self) -> None:
        self._done.wait()
        self.is_busy = False
        if self._error is not None:
            raise self._error

    def halt(self) -> None:
        """Ends after the piece at hand."""
        self._is_halt_wanted = True
        self._done.wait()
        self.is_busy = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The worker computes nothing inside of this."""
        if not self.is_busy or self._done.is_set():
            yield
            return
        self._paused.clear()
        self._is_pause_wanted = True
        if self._done.is_set():  # ended in between: nobody will answer
            self._paused.set()
        self._paused.wait()
        try:
            yield
        finally:
            self._is_pause_wanted = False
            if not self._done.is_set():  # else the batch ended instead
                self._may_run.release()

    def close(self) -> None:
        """End the thread and free the context."""
        if self.is_busy:
            self.halt()
        self._work.put(None)
        self._thread.join()
        self.context.close()

    def _serve(self) -> None:
        """Worker thread."""
        while (n_rows := self._work.get()) is not None:
            began_at_s = self._piece_began_at_s = time.perf_counter()
            self._paused_s = 0.0
            try:
                self.context.decode(n_rows)
            except Exception as error:
                self._error = self._error or error
            self.computed_s = time.perf_counter() - began_at_s - self._paused_s
            if self._is_halt_wanted or self._error is not None:
                native.llama_set_abort_callback(self.context.native, _go_on, None)
            with self._ending:
                self._done.set()
                self._paused.set()

    def _between_pieces(self, _tensor: object, is_question: bool, _data: object) -> bool:
        """Worker thread, from native code: whether a piece ends with this node, and then, once it was computed."""
        if is_question:
            return self._pieces.is_end()
        try:
            self._end_piece()
        except Exception as error:
            # ctypes would print it and go on with half of a graph.
            self._error = DecodeFailed(f"the background failed between two pieces: {error!r}", is_fatal=True)
        if self._is_halt_wanted or self._error is not None:
            # A graph that stops here would pass for one that was computed; the next operation gives up instead.
            native.llama_set_abort_callback(self.context.native, _give_up, None)
        self._piece_began_at_s = time.perf_counter()
        return True

    def _end_piece(self) -> None:
        """Wait if streams want a step."""
        self._pieces.note(time.perf_counter() - self._piece_began_at_s)
        if self._is_pause_wanted:
            paused_at_s = time.perf_counter()
            self._paused.set()
            self._may_run.acquire()
            self._paused_s += time.perf_counter() - paused_at_s
