"""The threads around an engine's loop, and what passes between them.

The *reader* takes frames from the daemon and hands each message to `take`, which fills the inbox and does nothing that
takes long; *tokenizing* threads make tokens of texts; the *main* thread does nothing but empty the inbox and step; the
outbox's *writer* sends what the pipe does not take at once. The loop ends within a step when the daemon closes the
pipe, or on SIGTERM.

Does not: open a model, or know what a message asks for (`process.py`).
"""

from __future__ import annotations

import gc
import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

from localrun import framing, wire
from localrun.engine.backend import Backend
from localrun.engine.embedding.inputs import Embedder
from localrun.errors import EngineFailed, LocalrunError, QueueFull
from localrun.hardware import kernels

log = logging.getLogger("localrun.engine")


class Steps(Protocol):
    """An engine, as the loop sees it.

    `can_defer_output`: the output of the last step may wait for the next one, which calls the function given to
    `call_during_steps` while it computes. `wait_s`: how long the next step has nothing to do, unless something rings.
    """

    wait_s: float

    @property
    def is_idle(self) -> bool: ...

    @property
    def can_defer_output(self) -> bool: ...

    def call_during_steps(self, on_compute: Callable[[], None]) -> None: ...

    def step(self, should_abort: Callable[[], bool]) -> wire.Step | None:
        """`should_abort`: whether somebody waits for whom this step may be given up."""


E = TypeVar("E", bound=Steps)


class Inbox(Generic[E]):
    """The way into the main thread, and the only place where that sleeps. Any thread puts work, and a signal handler;
    the main thread drains. `E` is what the work is done on: the engine.

    A SimpleQueue, because a signal handler puts into it too: its `put` may interrupt itself, which a lock or an event
    would not survive.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[Callable[[E], None] | None] = SimpleQueue()
        self.exit_code = 0
        self._should_abort = False

    def put(self, item: Callable[[E], None], *, preempts: bool = False) -> None:
        """More work. It `preempts` if a step of the lowest lane should be aborted for it."""
        self._items.put(item)
        if preempts:
            self._should_abort = True

    def ring(self) -> None:
        """Something beside the steps is over: the main thread should look."""
        self._items.put(lambda _: None)

    def should_abort(self) -> bool:
        """Whether there may be work that preempts."""
        return self._should_abort

    @property
    def has_work(self) -> bool:
        return not self._items.empty()

    def leave(self, exit_code: int) -> None:
        """Let the main loop end."""
        self.exit_code = self.exit_code or exit_code
        self._items.put(None)

    def drain(self, engine: E, wait_s: float | None = 0.0) -> bool:
        """Do everything that is there; first sleep until there is something, for so long at most, None or infinity for
        as long as it takes. False when it is time to go."""
        self._should_abort = False
        may_wait, timeout_s = wait_s != 0, None if wait_s == math.inf else wait_s
        try:
            while (item := self._items.get(may_wait, timeout_s)) is not None:
                item(engine)
                may_wait = False
        except Empty:
            return True
        return False


# Windows has no pipes that refuse instead of waiting.
_CAN_TRY = sys.platform != "win32"


class Outbox:
    """Frames on their way to the daemon.

    Whoever has a message sends it at once, as long as the pipe takes it: waking a thread for it would take a core from
    the computing threads twice per step. What the pipe does not take is left to the *writer* thread, in order, so a
    daemon that is slow to read never holds up a step.

    Where a step computes without the main thread, what the step before said is held until then: encoding it and writing
    it takes no time from either (`hold`, `send_held`). On a CPU, where a step needs every core, that gains nothing.

    Owner: any thread may `put`; the main thread holds. Does not: bound the backlog; a daemon that reads nothing ends
    the engine (`stall.py`).

    `on_broken` is called once, with the error, when the daemon is gone or the writer fails.
    """

    def __init__(self, descriptor: int, on_broken: Callable[[BaseException], None]) -> None:
        self._descriptor = descriptor
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._backlog: deque[bytes] = deque()
        self._held: object = None
        self._has_backlog = threading.Event()
        if _CAN_TRY:
            os.set_blocking(descriptor, False)
        threading.Thread(target=self._serve, name="writer", daemon=True).start()

    def hold(self, message: object) -> None:
        """Keep a message for `send_held`; at most one."""
        assert self._held is None, "what was held before was never sent"
        self._held = message

    def send_held(self) -> None:
        """Send what is held, if anything is."""
        if self._held is not None:
            message, self._held = self._held, None
            self.put(message)

    def put(self, message: object) -> None:
        """Send a message after all that were put before."""
        data = framing.encode(message)
        with self._lock:
            if _CAN_TRY and not self._backlog:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:
                    pass
                except OSError as error:
                    self._on_broken(error)
                    return
            if data:
                self._backlog.append(data)
                self._has_backlog.set()

    def _serve(self) -> None:
        """Writer thread."""
        try:
            while True:
                self._has_backlog.wait()
                self._write_first()
        except BaseException as error:
            self._on_broken(error)

    def _write_first(self) -> None:
        data = self._backlog[0]
        if _CAN_TRY:
            select.select([], [self._descriptor], [])
        try:
            rest = data[os.write(self._descriptor, data) :]
        except BlockingIOError:
            return
        with self._lock:
            if rest:
                self._backlog[0] = rest
                return
            self._backlog.popleft()
            if not self._backlog:
                self._has_backlog.clear()


# Some 15 ms of a native tokenizer.
LONG_CHARACTERS = 1 << 15

T = TypeVar("T")


@dataclass(eq=False)
class Text(Generic[T]):
    """`read` makes of it what `deliver` is then given. Texts of the same `client` are delivered in order."""

    id: int
    client: Hashable
    n_characters: int
    read: Callable[[], T]
    deliver: Callable[[T], None]
    is_under_way: bool = False
    is_dropped: bool = False


class TokenizerThreads:
    """Texts on their way to tokens, in threads beside the reader and the steps.

    A megabyte takes half a second. So the reader only hands texts over and reads on, and a cancel overtakes them
    (`drop`). One thread reads long texts and another one short texts, which therefore wait for no long one but those of
    their own client: the texts of a client are read one after another, in the order in which they came.

    Owner: any thread may call. Native tokenizers release the interpreter lock, and only read the vocabulary.
    Invariant: `deliver` is called once for every text that was put, unless `drop` or `close` came before.
    Does not: know models or messages.

    No more than `max_texts` wait or are under way.
    """

    def __init__(self, *, max_texts: int) -> None:
        self._max_texts = max_texts
        self._changed = threading.Condition()
        # Of each client, whose turn it is first. A text stays in its queue until it was read.
        self._queues: dict[Hashable, deque[Text[Any]]] = {}
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(is_long,), name=name, daemon=True)
            for is_long, name in ((False, "short texts"), (True, "long texts"))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, text: Text[T], *, is_resumed: bool = False) -> None:
        """A new text, to be read after those of its client. Raises QueueFull, but not for one that another engine had
        taken."""
        with self._changed:
            n_texts = sum(map(len, self._queues.values()))
            if n_texts >= self._max_texts and not is_resumed:
                raise QueueFull(f"{n_texts} prompts wait to be tokenized; ask later", retry_after_s=1.0)
            self._queues.setdefault(text.client, deque()).append(text)
            self._changed.notify_all()

    def drop(self, text_id: int) -> bool:
        """Forget a text. False if it was delivered already, or never put."""
        with self._changed:
            text = next((text for text in self._texts() if text.id == text_id and not text.is_dropped), None)
            if text is None:
                return False
            text.is_dropped = True
            if not text.is_under_way:
                self._remove(text)
            return True

    def close(self, timeout_s: float) -> bool:
        """Deliver nothing more. Whether the threads ended within `timeout_s`, so that the vocabulary may be freed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, is_long: bool) -> None:
        """A thread."""
        while (text := self._take(is_long)) is not None:
            result = text.read()
            with self._changed:
                self._remove(text)
                if not text.is_dropped and not self._is_closed:
                    text.deliver(result)

    def _take(self, is_long: bool) -> Text[Any] | None:
        """The next text of a length, waited for; None at the end."""
        with self._changed:
            while not self._is_closed:
                for queue in self._queues.values():
                    text = queue[0]
                    if not text.is_under_way and (text.n_characters >= LONG_CHARACTERS) == is_long:
                        text.is_under_way = True
                        return text
                self._changed.wait()
            return None

    def _remove(self, text: Text[Any]) -> None:
        """Remove a finished text, and move its client's queue to the end."""
        queue = self._queues.pop(text.client)
        queue.remove(text)
        if queue:
            self._queues[text.client] = queue
        self._changed.notify_all()

    def _texts(self) -> Iterator[Text[Any]]:
        return (text for queue in self._queues.values() for text in queue)


def in_thread(name: str) -> Callable[[Callable[[], T]], Callable[[], T | None]]:
    """A thread beside the steps, for one thing after another. Who hands it something gets what to ask for the result,
    which is None until it is there."""
    thread = ThreadPoolExecutor(1, name)

    def begin(work: Callable[[], T]) -> Callable[[], T | None]:
        done = thread.submit(work)
        return lambda: done.result() if done.done() else None

    return begin


# At the end a text may be read for this long before the process leaves without freeing the model under it; with the
# rest of what is done at the end that is less than the daemon's patience.
READ_GRACE_S = 0.5
# A native call cannot be interrupted; if one outlives the daemon by this long the process leaves without it.
ORPHAN_GRACE_S = 5.0

FAILED, BROKEN_PIPE = 1, 2


Take = Callable[[wire.ToEngine, Inbox[E], Outbox], None]
# Told after every step whether the engine is idle, it may do something short. Returns how long to wait for a message
# until the next call, None for as long as it takes.
SpareTime = Callable[[bool], float | None]


def send(frames_out: BinaryIO, message: object) -> None:
    """One frame, before there is an outbox."""
    frames_out.write(framing.encode(message))
    frames_out.flush()


def ready(model: Backend | Embedder, opened: wire.Open, load_s: float, *, n_slots: int, **own: Any) -> wire.Ready:
    """What the daemon is told of a model that was opened in so many seconds. `own` is what not all engines have."""
    projector = model.projector
    return wire.Ready(
        n_ctx=model.n_ctx,
        n_ctx_train=model.n_ctx_train,
        n_vocab=model.n_vocab,
        n_slots=n_slots,
        n_kv_cells=model.n_cells,
        n_threads=model.n_threads,
        n_gpu_layers=model.n_gpu_layers,
        model_size_bytes=model.model_size_bytes,
        kv_size_bytes=opened.kv_bytes,
        load_s=load_s,
        backend=model.name,
        control_tokens=model.control_tokens,
        media=projector.kinds if projector is not None else (),
        audio_rate_hz=projector.audio_rate_hz if projector is not None else 0,
        **own,
    )


def refuse(frames_out: BinaryIO, error: Exception) -> int:
    """Tell the daemon why the model cannot be opened. Returns the exit code. Called while `error` is handled."""
    if isinstance(error, LocalrunError):
        send(frames_out, wire.OpenFailed(code=error.code, message=error.message))
    else:
        log.exception("the engine cannot start")
        problem = kernels.explain(str(error))
        message = problem.line if problem else f"the engine cannot start: {error!r}"
        send(frames_out, wire.OpenFailed(code=EngineFailed.code, message=message))
    return FAILED


def serve(
    engine: E,
    inbox: Inbox[E],
    frames_in: BinaryIO,
    frames_out: BinaryIO,
    take: Take[E],
    spare_time: SpareTime | None = None,
) -> int:
    """Runs until the end; `take` is called in the reader's thread. Returns the exit code."""
    # What is there now stays. To look through it took a step 4 ms now and then, and the interpreter 20 at its end.
    gc.freeze()
    outbox = Outbox(frames_out.fileno(), lambda error: _leave(inbox, error))
    signal.signal(signal.SIGTERM, lambda *_: inbox.leave(0))
    threading.Thread(target=_read, args=(frames_in, inbox, outbox, take), name="reader", daemon=True).start()
    run_steps(engine, inbox, outbox, spare_time)
    return inbox.exit_code


def run_steps(engine: E, inbox: Inbox[E], outbox: Outbox, spare_time: SpareTime | None = None) -> None:
    """The loop of the main thread: until the inbox says that it is time to go."""
    engine.call_during_steps(outbox.send_held)
    wait_s = None if engine.is_idle else 0.0
    while inbox.drain(engine, wait_s):
        step = engine.step(inbox.should_abort)
        outbox.send_held()  # where nothing was computed
        if step is not None:
            if engine.can_defer_output and not inbox.has_work:
                outbox.hold(step)
            else:
                outbox.put(step)
        is_idle = engine.is_idle
        pause_s = spare_time(is_idle) if spare_time is not None else None
        wait_s = pause_s if is_idle else engine.wait_s
    outbox.send_held()


def end(exit_code: int, tokenizing: TokenizerThreads, close: Callable[[], None]) -> int:
    """Free the model, with `close`. Returns the exit code, or not at all if the vocabulary is still being read."""
    if not tokenizing.close(READ_GRACE_S):
        os._exit(exit_code)
    close()
    return exit_code


def length_of(segments: Sequence[wire.Segment]) -> int:
    """Characters of a prompt. Media are read like long texts, for sound takes as long."""
    return sum(len(one.text) + len(one.tokens) if one.media is None else LONG_CHARACTERS for one in segments)


# Half of a frame: the other half is for the tokens themselves.
_MOST_PIECES_BYTES = framing.MAX_FRAME_BYTES // 2


def count(
    message: wire.Count,
    read: Callable[[], Sequence[int]],
    tokenizing: TokenizerThreads,
    outbox: Outbox,
    pieces: Callable[[Sequence[int], int], tuple[bytes, ...]],
) -> None:
    """Answer with the tokens that `read` makes of a text, and their `pieces` if they are wanted, in a while."""

    def answer() -> wire.Counted:
        try:
            tokens = _bounded(read())
            found = pieces(tokens, _MOST_PIECES_BYTES) if message.wants_pieces else ()
            return wire.Counted(id=message.id, tokens=tokens, pieces=found)
        except LocalrunError as error:
            return _uncounted(message.id, error)
        except Exception as error:
            log.exception("a text cannot be tokenized")
            return _uncounted(message.id, EngineFailed(f"the text cannot be tokenized: {error!r}"))

    length = length_of(message.segments)
    try:
        # Of no client: counts wait for nobody, nor for each other.
        tokenizing.put(Text(message.id, message.id, length, answer, outbox.put))
    except QueueFull as error:
        outbox.put(_uncounted(message.id, error))


def _uncounted(request_id: int, error: LocalrunError) -> wire.Counted:
    retry_after_s = error.retry_after_s if isinstance(error, QueueFull) else None
    return wire.Counted(id=request_id, error=error.message, error_code=error.code, retry_after_s=retry_after_s)


def _bounded(tokens: Sequence[int]) -> tuple[int, ...]:
    """What fits into a frame: beginning and end."""
    half = wire.MAX_COUNTED_TOKENS // 2
    return tuple(tokens) if len(tokens) <= 2 * half else (*tokens[:half], *tokens[-half:])


def _read(frames_in: BinaryIO, inbox: Inbox[E], outbox: Outbox, take: Take[E]) -> None:
    """Reader thread."""
    exit_code = 0
    try:
        while (body := framing.read_body(frames_in)) is not None:
            take(framing.decode_to_engine(body), inbox, outbox)
    except (OSError, framing.FrameError) as error:
        log.error("the pipe from the daemon broke: %s", error)
        exit_code = BROKEN_PIPE
    except BaseException:
        log.exception("the reader failed")
        exit_code = FAILED
    inbox.leave(exit_code)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(exit_code)


def _leave(inbox: Inbox[E], error: BaseException) -> None:
    """Nothing can be said to the daemon any more."""
    if not isinstance(error, OSError):
        log.error("the writer failed", exc_info=error)
    inbox.leave(0 if isinstance(error, OSError) else FAILED)
