"""Entry point of the engine process: `python -m localrun.engine.process [--fake]`.

Three threads. The *reader* takes frames from the daemon, tokenizes (reading a vocabulary is safe beside a step) and
fills the inbox. The *main* thread does nothing but empty the inbox and step. The *writer* encodes and sends. ctypes
releases the interpreter lock during native calls, so reader and writer work while a step computes.

At start the frame pipe moves to private descriptors, stdin becomes empty and stdout points at stderr, so that no
library's print can corrupt a frame. The process ends within a step when its stdin closes or on SIGTERM.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

import psutil

from localrun import wire
from localrun.engine import prompt
from localrun.engine.backend import Backend
from localrun.engine.engine import Engine, Limits
from localrun.errors import LocalrunError

log = logging.getLogger("localrun.engine")

# A native call cannot be interrupted; if one outlives the daemon by this long the process leaves without it.
ORPHAN_GRACE_S = 5.0
# Parked prefixes come on top of the running requests.
SPARE_SEQUENCES = 64
MAX_SEQUENCES = 256


class Inbox:
    """Work from the reader for the main thread. `None` means that the daemon is gone."""

    def __init__(self) -> None:
        self._items: deque[Callable[[Engine], None] | None] = deque()
        self._filled = threading.Event()

    def put(self, item: Callable[[Engine], None] | None) -> None:
        self._items.append(item)
        self._filled.set()

    def drain(self, engine: Engine, *, wait: bool) -> bool:
        """Run everything that waits; first sleep until there is something if `wait`. False when it is time to go."""
        if wait:
            self._filled.wait()
        self._filled.clear()
        while self._items:
            item = self._items.popleft()
            if item is None:
                return False
            item(engine)
        return True


def main(argv: list[str]) -> int:
    """Exit code 0 after a clean end, 1 when the model could not be opened, 2 for a broken pipe protocol."""
    frames_in, frames_out = _private_pipes()
    logging.basicConfig(
        stream=sys.stderr, level=os.environ.get("LOCALRUN_LOG_LEVEL", "INFO").upper(), format="%(message)s"
    )
    body = wire.read_body(frames_in)
    first = wire.decode_to_engine(body) if body is not None else None
    if not isinstance(first, wire.Open):
        return 2
    started_at_s = time.monotonic()
    try:
        backend = _fake_backend(first) if "--fake" in argv else _llama_backend(first)
    except LocalrunError as error:
        _send(frames_out, wire.OpenFailed(code=error.code, message=error.message))
        return 1
    _send(frames_out, _ready(backend, first, time.monotonic() - started_at_s))
    limits = Limits(first.n_slots, first.max_queue, first.target_itl_s, first.ram_cache_bytes)
    _run(Engine(backend, limits, time.monotonic), backend, frames_in, frames_out)
    backend.close()
    return 0


def _run(engine: Engine, backend: Backend, frames_in: BinaryIO, frames_out: BinaryIO) -> None:
    """The life of the process between `Ready` and the end."""
    inbox = Inbox()
    outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: inbox.put(None))
    # Ctrl-C in a terminal goes to the whole group; the daemon decides when its engines end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_read, args=(frames_in, backend, inbox, outbox), name="reader", daemon=True).start()
    threading.Thread(target=_write, args=(frames_out, outbox, inbox), name="writer", daemon=True).start()
    while inbox.drain(engine, wait=engine.is_idle):
        step = engine.step()
        if step is not None:
            outbox.put(step)


def _read(frames_in: BinaryIO, backend: Backend, inbox: Inbox, outbox: queue.SimpleQueue[object]) -> None:
    """Reader thread."""
    try:
        while (body := wire.read_body(frames_in)) is not None:
            message = wire.decode_to_engine(body)
            if isinstance(message, wire.Submit):
                tokens = (
                    list(message.tokens) if message.tokens is not None else prompt.tokenize(backend, message.segments)
                )
                inbox.put(_submission(message, tokens))
            elif isinstance(message, wire.Cancel):
                inbox.put(_cancellation(message.id))
            elif isinstance(message, wire.Count):
                outbox.put(wire.Counted(id=message.id, tokens=tuple(prompt.tokenize(backend, message.segments))))
    except (OSError, wire.FrameError) as error:
        log.error("the pipe from the daemon broke: %s", error)
    inbox.put(None)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(0)


def _write(frames_out: BinaryIO, outbox: queue.SimpleQueue[object], inbox: Inbox) -> None:
    """Writer thread."""
    try:
        while True:
            _send(frames_out, outbox.get())
    except OSError:
        inbox.put(None)


def _submission(message: wire.Submit, tokens: list[int]) -> Callable[[Engine], None]:
    return lambda engine: engine.submit(message, tokens)


def _cancellation(request_id: int) -> Callable[[Engine], None]:
    return lambda engine: engine.cancel(request_id)


def _send(frames_out: BinaryIO, message: object) -> None:
    frames_out.write(wire.encode(message))
    frames_out.flush()


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    frames_in, frames_out = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return os.fdopen(frames_in, "rb"), os.fdopen(frames_out, "wb")


def _n_sequences(opened: wire.Open) -> int:
    return min(MAX_SEQUENCES, opened.n_slots + SPARE_SEQUENCES)


def _fake_backend(opened: wire.Open) -> Backend:
    from localrun.engine.fake import FakeBackend

    return FakeBackend(n_cells=opened.n_kv_cells, n_seqs=_n_sequences(opened), n_batch=opened.n_batch)


def _llama_backend(opened: wire.Open) -> Backend:
    # Imported late: loading the native library takes a while and the fake must run without it.
    from localrun.engine.llama import LlamaBackend

    return LlamaBackend(
        opened.model_path,
        n_cells=opened.n_kv_cells,
        n_seqs=_n_sequences(opened),
        n_batch=opened.n_batch,
        n_threads=opened.n_threads or physical_cores(),
        n_gpu_layers=opened.n_gpu_layers,
        kv_type=opened.kv_type,
    )


def physical_cores() -> int:
    """Physical cores that this process may use: a second thread on one core only waits for the first."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def _ready(backend: Backend, opened: wire.Open, load_s: float) -> wire.Ready:
    return wire.Ready(
        n_ctx=backend.n_ctx,
        n_ctx_train=backend.n_ctx_train,
        n_vocab=backend.n_vocab,
        n_slots=opened.n_slots,
        n_kv_cells=backend.n_cells,
        n_threads=backend.n_threads,
        n_gpu_layers=backend.n_gpu_layers,
        model_size_bytes=backend.model_size_bytes,
        kv_size_bytes=backend.kv_size_bytes,
        load_s=load_s,
        backend=backend.name,
        control_tokens=backend.control_tokens,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
