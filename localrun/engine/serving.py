"""The life of an engine process between `Ready` and the end, whatever its engine computes.

Three threads: the *reader*, made here, takes frames from the daemon and hands each message to `take`, which fills the
inbox and does nothing that takes long; the *main* thread does nothing but empty the inbox and step; the outbox's
*writer* encodes and sends. The loop ends within a step when the daemon closes the pipe, or on SIGTERM.

Does not: open a model, or know what a message asks for.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, Protocol, TypeVar

from localrun import framing, library_problems, wire
from localrun.engine.inbox import Inbox
from localrun.engine.outbox import Outbox
from localrun.engine.tokenizing import Text, Tokenizing
from localrun.errors import EngineFailed, LocalrunError, QueueFull

log = logging.getLogger("localrun.engine")

# At the end a text may be read for this long before the process leaves without freeing the model under it; with the
# rest of what is done at the end that is less than the daemon's patience.
READ_GRACE_S = 0.5
# A native call cannot be interrupted; if one outlives the daemon by this long the process leaves without it.
ORPHAN_GRACE_S = 5.0

FAILED, BROKEN_PIPE = 1, 2


class Steps(Protocol):
    """An engine, as the loop sees it."""

    @property
    def is_idle(self) -> bool: ...

    def step(self) -> wire.Step | None: ...


class Sink(Protocol):
    """Where answers go: the outbox."""

    def put(self, message: object) -> None: ...


E = TypeVar("E", bound=Steps)
Take = Callable[[wire.ToEngine, Inbox[E], Outbox], None]
# Told after every step whether the engine is idle, it may do something short. Returns how long to wait for a message
# until the next call, None for as long as it takes.
SpareTime = Callable[[bool], float | None]


def send(frames_out: BinaryIO, message: object) -> None:
    """One frame, before there is an outbox."""
    frames_out.write(framing.encode(message))
    frames_out.flush()


def refuse(frames_out: BinaryIO, error: Exception) -> int:
    """Tell the daemon why the model cannot be opened. Returns the exit code. Called while `error` is handled."""
    if isinstance(error, LocalrunError):
        send(frames_out, wire.OpenFailed(code=error.code, message=error.message))
    else:
        log.exception("the engine cannot start")
        problem = library_problems.explain(str(error))
        message = problem.line if problem else f"the engine cannot start: {error!r}"
        send(frames_out, wire.OpenFailed(code=EngineFailed.code, message=message))
    return FAILED


def serve(
    engine: E, frames_in: BinaryIO, frames_out: BinaryIO, take: Take[E], spare_time: SpareTime | None = None
) -> int:
    """Runs until the end; `take` is called in the reader's thread. Returns the exit code."""
    inbox: Inbox[E] = Inbox()
    outbox = Outbox(frames_out.fileno(), lambda error: _leave(inbox, error))
    signal.signal(signal.SIGTERM, lambda *_: inbox.leave(0))
    threading.Thread(target=_read, args=(frames_in, inbox, outbox, take), name="reader", daemon=True).start()
    is_idle, pause_s = engine.is_idle, None
    while inbox.drain(engine, wait=is_idle, timeout_s=pause_s):
        step = engine.step()
        if step is not None:
            outbox.put(step)
        is_idle = engine.is_idle
        pause_s = spare_time(is_idle) if spare_time is not None else None
    return inbox.exit_code


def end(exit_code: int, tokenizing: Tokenizing, close: Callable[[], None]) -> int:
    """Free the model, with `close`. Returns the exit code, or not at all if the vocabulary is still being read."""
    if not tokenizing.close(READ_GRACE_S):
        os._exit(exit_code)
    close()
    return exit_code


def count(message: wire.Count, read: Callable[[], Sequence[int]], tokenizing: Tokenizing, outbox: Sink) -> None:
    """Answer with the tokens that `read` makes of a text, in a while."""

    def answer() -> wire.Counted:
        try:
            return wire.Counted(id=message.id, tokens=_bounded(read()))
        except Exception as error:
            log.exception("a text cannot be tokenized")
            return wire.Counted(id=message.id, error=f"the text cannot be tokenized: {error!r}")

    length = sum(len(segment.text) for segment in message.segments)
    try:
        # Of no client: counts wait for nobody, nor for each other.
        tokenizing.put(Text(message.id, message.id, length, answer, outbox.put))
    except QueueFull as error:
        outbox.put(wire.Counted(id=message.id, error=error.message))


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
