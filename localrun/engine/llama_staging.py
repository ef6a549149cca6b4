"""Computes long prompts in a context of their own, in a thread of their own, in a way that can be paused.

A prompt is computed fastest in large batches, and a large batch is a long time without a token for everybody else. A
context on the CPU asks a callback after every operation of its graph whether to go on; here that callback waits while
streams are being decoded. So a stream waits for one operation, some milliseconds, and not for hundreds of rows, and the
batch is as large as the kernels like it. Measured with a 135M model on two cores, 2,400 tokens beside three streams: in
pieces of 64 rows between decodes 3.7 to 4.0 s with gaps of up to 170 ms; paused every 80 ms 3.05 s, with gaps of 96 ms.

Two threads: the engine's main thread calls everything here, the *worker* is inside `llama_decode`. OpenMP gives each of
them a team of its own; while one computes the other's sleeps.

Invariants: the context belongs to the worker between `start` and `finish`, and to the main thread otherwise. Who pauses
resumes: nothing else waits for anything.
Does not: choose rows or moments (`staging.py`). It works on the CPU backend only: GPUs do not ask.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from localrun.engine.llama_context import LlamaContext
from localrun.engine.llama_native import native

_Callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)


class LlamaStaging:
    """See the module."""

    def __init__(self, context: LlamaContext) -> None:
        self.context = context
        self.is_busy = False
        self._work: SimpleQueue[int | None] = SimpleQueue()
        self._done = threading.Event()
        self._paused = threading.Event()
        self._may_run = threading.Event()
        self._is_pause_wanted = False
        self._is_abort_wanted = False
        self._error: Exception | None = None
        self._callback = _Callback(self._after_operation)  # native code holds a bare pointer to it
        native.llama_set_abort_callback(context.native, ctypes.cast(self._callback, native.ggml_abort_callback), None)
        self._thread = threading.Thread(target=self._serve, name="staging", daemon=True)
        self._thread.start()

    def start(self, n_rows: int) -> None:
        """Begin to compute the first rows of the context's batch."""
        assert not self.is_busy, "one batch at a time"
        self.is_busy = True
        self._is_abort_wanted = False
        self._error = None
        self._done.clear()
        self._work.put(n_rows)

    def wait(self, timeout_s: float) -> bool:
        """Whether what was started is over, after waiting for that at most so long."""
        return self._done.wait(timeout_s)

    def finish(self) -> None:
        """Take the context back once it is over. Raises what the decode raised: NoRoom or DecodeFailed."""
        self._done.wait()
        self.is_busy = False
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Give up what was started, after the operation at hand, and take the context back."""
        self._is_abort_wanted = True
        self._done.wait()
        self.is_busy = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The worker computes nothing inside of this."""
        if not self.is_busy or self._done.is_set():
            yield
            return
        self._may_run.clear()
        self._paused.clear()
        self._is_pause_wanted = True
        if self._done.is_set():  # ended in between: nobody will answer
            self._paused.set()
        self._paused.wait()
        try:
            yield
        finally:
            self._is_pause_wanted = False
            self._may_run.set()

    def close(self) -> None:
        """End the thread and free the context."""
        if self.is_busy:
            self.abort()
        self._work.put(None)
        self._thread.join()
        self.context.close()

    def _serve(self) -> None:
        """Worker thread."""
        while (n_rows := self._work.get()) is not None:
            try:
                self.context.decode(n_rows)
            except Exception as error:
                self._error = error
            self._done.set()
            self._paused.set()

    def _after_operation(self, _data: object) -> bool:
        """Worker thread, from native code. True gives up."""
        if self._is_pause_wanted:
            self._paused.set()
            self._may_run.wait()
        return self._is_abort_wanted
