"""The life of an engine process that was opened for embeddings; `engine.process` hands over to it.

Threads as there: a reader that fills the inbox, the main thread that empties it and steps, and the outbox's writer.
Unlike there, the main thread tokenizes what is computed, one input at a time; only what is counted goes through
`pipes.py`.

The process asks the system for less of the processor than its neighbours get, so that streams of a chat which runs
beside a large batch of documents keep their pace; on a machine that is otherwise idle this costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import BinaryIO

from localrun import wire
from localrun.engine import pipes
from localrun.engine.embedding.engine import EmbeddingEngine
from localrun.engine.embedding.inputs import Embedder, tokens_of
from localrun.engine.encoding import ENCODED_PART
from localrun.engine.pipes import Inbox, TokenizerThreads
from localrun.errors import EngineFailed
from localrun.processes import step_back

# Steps on the scale of `nice`: with 5 a stream of the same lane has about three quarters of a shared core.
NICENESS = 5


def run(
    opened: wire.Open, new_embedder: Callable[[wire.Open], Embedder], frames_in: BinaryIO, frames_out: BinaryIO
) -> int:
    """From the `Open` frame to the end. Returns the exit code, as `engine.process.main` does."""
    began_s = time.monotonic()
    step_back(NICENESS)
    try:
        embedder = new_embedder(opened)
    except Exception as error:
        return pipes.refuse(frames_out, error)
    inbox: Inbox[EmbeddingEngine] = Inbox()
    encoded_bytes = opened.ram_cache_bytes // ENCODED_PART
    engine = EmbeddingEngine(
        embedder, max_queue=opened.max_queue, clock=time.monotonic, encoded_bytes=encoded_bytes, ring=inbox.ring
    )
    load_s = time.monotonic() - began_s
    pipes.send(frames_out, pipes.ready(embedder, opened, load_s, n_slots=embedder.n_seqs, n_embd=embedder.n_embd))
    tokenizing = TokenizerThreads(max_texts=opened.n_slots + opened.max_queue)
    exit_code = pipes.serve(
        engine,
        inbox,
        frames_in,
        frames_out,
        lambda message, inbox, outbox: take(message, embedder, tokenizing, inbox, outbox),
    )
    if exit_code == 0:
        engine.close()
    return pipes.end(exit_code, tokenizing, embedder.close)


def take(
    message: wire.ToEngine,
    embedder: Embedder,
    tokenizing: TokenizerThreads,
    inbox: Inbox[EmbeddingEngine],
    outbox: pipes.Outbox,
) -> None:
    """One message from the daemon. Of what is kept, only encoded media could be cleared, which nobody counts."""
    if isinstance(message, wire.Embed):
        embed = message
        inbox.put(lambda engine: engine.submit(embed))
    elif isinstance(message, wire.Cancel):
        cancelled = message.id
        inbox.put(lambda engine: engine.cancel(cancelled))
    elif isinstance(message, wire.Submit):
        refused = message.id
        inbox.put(lambda engine: engine.refuse(refused, EngineFailed("this engine computes embeddings only")))
    elif isinstance(message, wire.Count):
        pipes.count(message, partial(_read, embedder, message.segments), tokenizing, outbox, _no_pieces)
    elif isinstance(message, wire.ClearCache):
        inbox.put(lambda engine: engine.clear())
        outbox.put(wire.Cleared(id=message.id, ram_bytes=0, disk_bytes=0))


def _read(embedder: Embedder, segments: Sequence[wire.Segment]) -> list[int]:
    mixed = wire.Mixed(tuple(segments))
    return tokens_of(embedder, mixed, query=None, truncate=False, where="the text").tokens


def _no_pieces(*_: object) -> tuple[bytes, ...]:
    raise EngineFailed("an engine that computes embeddings does not say what its tokens stand for")
