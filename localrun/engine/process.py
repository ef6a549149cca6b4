"""Entry point of the engine process, which generates text or, opened with a pooling mode, turns texts into vectors:
`python -m localrun.engine.process`.

Its threads are those of `pipes.py`. ctypes releases the interpreter lock during native calls, so all of them work while
a step computes; reading a vocabulary is safe beside one.

At start the frame pipe moves to private descriptors, stdin becomes empty and stdout points at stderr, so that no
library's print can corrupt a frame. The process ends within a step when its stdin closes or on SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from localrun import framing, wire
from localrun.engine import pipes
from localrun.engine.backend import MAX_SEQUENCES, AdapterSet, Backend
from localrun.engine.cache.disk import open_disk
from localrun.engine.cache.disk_files import library_build
from localrun.engine.embedding.inputs import Embedder, tokens_of
from localrun.engine.encoding import ENCODED_PART
from localrun.engine.engine import Engine, Limits
from localrun.engine.native.threads import N_BATCH, N_CELLS, N_SEQS, ThreadTrial, plan_threads
from localrun.engine.pipes import BROKEN_PIPE, Text, TokenizerThreads
from localrun.engine.pipes import Inbox as EngineInbox
from localrun.engine.request import Request
from localrun.engine.sample.text import Prompt, count, parts_of, pieces, prompt_of
from localrun.engine.speculate.draft_model import DraftModel, DraftModels
from localrun.engine.speculate.speculation import Drafter, Heads, Speculation
from localrun.errors import EngineFailed, LocalrunError, QueueFull
from localrun.hardware import processors, thread_choice
from localrun.hardware.thread_choice import Threads
from localrun.processes import step_back

if TYPE_CHECKING:
    from localrun.engine.embedding.engine import EmbeddingEngine

log = logging.getLogger("localrun.engine")

# Parked prefixes come on top of the running requests.
SPARE_SEQUENCES = 64
# Rows of a step that streams leave to prompts even where a batch is asked for that has no more rows than slots.
SPARE_ROWS = 32

# Compute buffers, the CUDA context and other programs' surfaces come on top of weights and KV cells.
USABLE_FRACTION = 0.85

# How long an idle engine waits for a disk that is behind, at a time.
DISK_PAUSE_S = 0.2
# What may still be written to disk at the end. The daemon waits longer than this before it kills.
FLUSH_TIMEOUT_S = 2.0

Inbox = EngineInbox[Engine]


class Make(NamedTuple):
    """What makes the parts of an engine, as the frame `Open` wants them: here llama.cpp's, in tests others."""

    # The backend, and what finds out how many threads are good for it if nobody knows.
    backend: Callable[[wire.Open], tuple[Backend, ThreadTrial | None]]
    # The models that draft, and the model's own heads.
    drafters: Callable[[wire.Open, Backend], tuple[DraftModels | None, Callable[[], Heads | None] | None]]
    embedder: Callable[[wire.Open], Embedder]
    # Names the build; what is kept on disk belongs to one.
    build: Callable[[], str]
    engine: type[Engine] = Engine


def main(make: Make) -> int:
    """Exit code 0 after a clean end, 1 when the model could not be opened or the engine failed, 2 for a broken pipe
    protocol."""
    # Ctrl-C in a terminal goes to the whole group; the daemon decides when its engines end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    frames_in, frames_out = _private_pipes()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    try:
        body = framing.read_body(frames_in)
        first = framing.decode_to_engine(body) if body is not None else None
    except framing.FrameError as error:
        log.error("the pipe from the daemon is broken: %s", error)
        return BROKEN_PIPE
    if not isinstance(first, wire.Open):
        return BROKEN_PIPE
    logging.getLogger().setLevel(first.log_level.upper())
    if first.pooling is not None:
        return _embed(first, make.embedder, frames_in, frames_out)
    started_at_s = time.monotonic()
    limits = Limits(first.n_slots, first.max_queue, first.target_itl_s, first.ram_cache_bytes)
    inbox = Inbox()
    try:
        backend, trial = make.backend(first)
        adapters = AdapterSet.of(first.adapters)
        for adapter in adapters.adapters:
            backend.load_adapter(adapter)
        disk = open_disk(first, backend, make.build)
        drafts, heads = make.drafters(first, backend)
        speculation = Speculation(
            backend,
            time.monotonic,
            is_on=first.speculates,
            drafter_of=partial(_drafter_of, drafts, first.draft_model_path) if drafts is not None else None,
            heads=heads,
        )
        engine = make.engine(
            backend,
            limits,
            time.monotonic,
            disk,
            beside=pipes.in_thread("map"),
            speculation=speculation,
            adapters=adapters,
            ring=inbox.ring,
            cpu_clock=time.thread_time,
        )
    except Exception as error:
        return pipes.refuse(frames_out, error)
    ready = pipes.ready(
        backend,
        first,
        time.monotonic() - started_at_s,
        n_slots=first.n_slots,
        n_pool_cells=backend.n_cells if backend.is_split else 0,
        eog_tokens=tuple(sorted(backend.eog_tokens)),
    )
    pipes.send(frames_out, ready)
    tokenizing, prompts = TokenizerThreads(max_texts=first.n_slots + first.max_queue), PromptTokenizer(backend)
    exit_code = pipes.serve(
        engine,
        inbox,
        frames_in,
        frames_out,
        lambda message, inbox, outbox: take(message, prompts, tokenizing, inbox, outbox),
        spare_time(engine, trial),
    )
    if trial is not None:
        trial.close()
    if exit_code == 0:
        engine.close()
    engine.cache.tiers.flush(FLUSH_TIMEOUT_S, time.monotonic)

    def close() -> None:
        if drafts is not None:
            drafts.close()
        backend.close()

    return pipes.end(exit_code, tokenizing, close)


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    frames_in, frames_out = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return os.fdopen(frames_in, "rb"), os.fdopen(frames_out, "wb")


def spare_time(engine: Engine, trial: pipes.SpareTime | None) -> pipes.SpareTime:
    """After every step: a piece of the trial of threads. While a slow disk holds up what is to be written, an idle
    engine looks again now and then."""

    def spend(is_idle: bool) -> float | None:
        pause_s = trial(is_idle) if trial is not None else None
        return DISK_PAUSE_S if pause_s is None and engine.cache.tiers.is_held_up else pause_s

    return spend


class PromptTokenizer:
    """From text to tokens. The last prompt is remembered for the `n` answers to one request, which have the same; but
    only for its own client, since how long this takes must not tell one client what another one asked.

    Owner: the threads that read texts; two at once may read the same text twice, and no more than that.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._last: tuple[object, Prompt, list[int]] | None = None

    def read(self, submit: wire.Submit, prediction: str) -> tuple[Prompt, list[int]]:
        """The tokens of a prompt, which may grow, and those of its prediction, which may not. Raises what
        `prompt_of` and the vocabulary raise."""
        said = submit.client, submit.segments, submit.tokens, prediction
        last = self._last
        if last is not None and last[0] == said:
            _, prompt, predicted = last
        else:
            prompt = prompt_of(self.backend, submit)
            predicted = self.backend.tokenize(prediction, parse_special=False)
            if not prompt.chunks:  # whose pseudo tokens may be those of one request alone
                self._last = said, prompt, predicted
        return Prompt(list(prompt.tokens), prompt.chunks), predicted


def take(
    message: wire.ToEngine, prompts: PromptTokenizer, tokenizing: TokenizerThreads, inbox: Inbox, outbox: pipes.Outbox
) -> None:
    """One message from the daemon. A text that cannot be tokenized fails its own request and nothing else."""
    if isinstance(message, wire.Submit):
        submit = message
        prediction = "" if submit.speculates is False else submit.prediction
        length = pipes.length_of(submit.segments) + len(prediction)
        read = partial(_read_prompt, prompts, submit, prediction)
        try:
            deliver = partial(inbox.put, preempts=submit.lane is not wire.Lane.BATCH)
            text = Text(submit.id, submit.client, length, read, deliver)
            tokenizing.put(text, is_resumed=submit.resume is not None)
        except QueueFull as error:
            inbox.put(_refusal(submit.id, error))
    elif isinstance(message, wire.Cancel):
        cancelled = message.id
        if tokenizing.drop(cancelled):
            inbox.put(_refusal(cancelled, None))
        else:
            inbox.put(lambda engine: engine.cancel(cancelled))
    elif isinstance(message, wire.Count):
        backend = prompts.backend
        pipes.count(message, partial(count, backend, message), tokenizing, outbox, partial(pieces, backend))
    elif isinstance(message, wire.ClearCache):
        inbox.put(_clearing(message, outbox))


def _read_prompt(prompts: PromptTokenizer, submit: wire.Submit, prediction: str) -> Callable[[Engine], None]:
    """What the engine is to do with a request once its prompt and its prediction are tokens."""
    try:
        (tokens, chunks), predicted = prompts.read(submit, prediction)
        prompts.backend.learn(submit.sampling)
    except LocalrunError as error:
        return _refusal(submit.id, error)
    except Exception as error:
        log.exception("a prompt cannot be tokenized")
        return _refusal(submit.id, EngineFailed(f"the prompt cannot be tokenized: {error!r}"))
    return lambda engine: engine.submit(submit, tokens, predicted, chunks)


def _refusal(request_id: int, error: LocalrunError | None) -> Callable[[Engine], None]:
    return lambda engine: engine.refuse(request_id, error)


def _clearing(message: wire.ClearCache, outbox: pipes.Outbox) -> Callable[[Engine], None]:
    def clear(engine: Engine) -> None:
        tiers = engine.cache.tiers
        ram_bytes, disk_bytes = tiers.size_bytes, tiers.disk_bytes
        engine.clear_cache(ram=message.ram, disk=message.disk)
        outbox.put(
            wire.Cleared(
                id=message.id, ram_bytes=ram_bytes - tiers.size_bytes, disk_bytes=disk_bytes - tiers.disk_bytes
            )
        )

    return clear


# --- an engine for vectors ---

# Steps on the scale of `nice`: with 5 a stream of the same lane has about three quarters of a shared core.
EMBEDDING_NICENESS = 5


def _embed(
    opened: wire.Open, new_embedder: Callable[[wire.Open], Embedder], frames_in: BinaryIO, frames_out: BinaryIO
) -> int:
    """From the `Open` frame to the end. Unlike where text is generated, the main thread tokenizes what is computed, one
    input at a time; only what is counted is read by threads.

    The process asks the system for less of the processor than its neighbours get, so that streams of a chat which runs
    beside a large batch of documents keep their pace; on a machine that is otherwise idle this costs nothing."""
    from localrun.engine.embedding.engine import EmbeddingEngine

    began_s = time.monotonic()
    step_back(EMBEDDING_NICENESS)
    try:
        embedder = new_embedder(opened)
    except Exception as error:
        return pipes.refuse(frames_out, error)
    inbox = EngineInbox[EmbeddingEngine]()
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
        lambda message, inbox, outbox: _take_for_vectors(message, embedder, tokenizing, inbox, outbox),
    )
    if exit_code == 0:
        engine.close()
    return pipes.end(exit_code, tokenizing, embedder.close)


def _take_for_vectors(
    message: wire.ToEngine,
    embedder: Embedder,
    tokenizing: TokenizerThreads,
    inbox: EngineInbox[EmbeddingEngine],
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
        pipes.count(
            message, partial(_count_for_vectors, embedder, message), tokenizing, outbox, partial(pieces, embedder)
        )
    elif isinstance(message, wire.ClearCache):
        inbox.put(lambda engine: engine.clear())
        outbox.put(wire.Cleared(id=message.id, ram_bytes=0, disk_bytes=0))


def _count_for_vectors(embedder: Embedder, message: wire.Count) -> list[int]:
    if not message.is_prompt:
        return parts_of(embedder, message.segments)
    mixed = wire.Mixed(tuple(message.segments))
    return tokens_of(embedder, mixed, query=None, truncate=False, where="the text").tokens


# --- the parts that the frame `Open` wants, of llama.cpp ---


def n_spare_sequences(opened: wire.Open) -> int:
    """Sequences beside those of the slots."""
    return min(MAX_SEQUENCES - opened.n_slots, SPARE_SEQUENCES)


def n_rows(opened: wire.Open) -> int:
    """Rows of a step, at most."""
    return max(opened.n_batch, opened.n_slots + SPARE_ROWS)


def _llama_backend(opened: wire.Open) -> tuple[Backend, ThreadTrial | None]:
    # Imported late: loading the native library takes a while, and who makes other parts does without it.
    from localrun.engine.native.context import Rope
    from localrun.engine.native.llama import LlamaBackend

    plan = plan_threads(opened, processors.usable(), _llama_build)
    backend = LlamaBackend(
        opened.model_path,
        n_cells=opened.n_kv_cells,
        n_seqs=opened.n_slots,
        n_spare_seqs=n_spare_sequences(opened),
        n_batch=n_rows(opened),
        n_threads=plan.start.most,
        n_gpu_layers=_gpu_layers(opened),
        kv_type=opened.kv_type,
        use_extra_bufts=opened.use_extra_bufts,
        may_draft=opened.speculates,
        projector_path=opened.projector_path,
        n_ctx=opened.n_ctx,
        rope=Rope(*opened.rope),
    )
    backend.set_threads(plan.start, may_use_fewer=True)
    if plan.kept is None or backend.n_gpu_layers:
        return backend, None
    entry, path = plan.kept, Path(opened.threads_file)

    def use(threads: Threads) -> None:
        log.info("measured: %d threads are good for streams, %d for prompts", threads.decode, threads.prompt)
        backend.set_threads(threads, may_use_fewer=True)
        try:
            thread_choice.keep(path, entry(threads, time.time()))
        except OSError as error:
            log.warning("what was measured cannot be kept: %s", error)

    return backend, ThreadTrial(
        plan.candidates,
        lambda: backend.measured_context(max(plan.candidates), n_cells=N_CELLS, n_seqs=N_SEQS, n_batch=N_BATCH),
        use,
        time.perf_counter,
        processors.others_busy_s,
    )


def _drafters(opened: wire.Open, backend: Backend) -> tuple[DraftModels, Callable[[], Heads | None]]:
    """A draft model of its own is loaded now."""
    from localrun.engine.native.llama import LlamaBackend

    assert isinstance(backend, LlamaBackend)

    def open_draft(path: str, is_wanted: Callable[[], bool]) -> DraftModel:
        return DraftModel(backend.open_draft(path, is_wanted), time.perf_counter)

    drafts = DraftModels(open_draft)  # a request may name one
    if opened.speculates:
        try:
            drafts = DraftModels(open_draft, opened.draft_model_path)
        except LocalrunError as error:
            log.warning("the model goes on without its draft model: %s", error)
    return drafts, lambda: backend.heads


def _drafter_of(drafts: DraftModels, own_path: str, request: Request) -> Drafter | None:
    """Draft models are not asked in vain."""
    return drafts.drafter_for(request) if own_path or request.draft_model_path else None


def _llama_embedder(opened: wire.Open) -> Embedder:
    from localrun.engine.native.context import Rope
    from localrun.engine.native.embedder import LlamaEmbedder

    assert opened.pooling is not None
    return LlamaEmbedder(
        opened.model_path,
        pooling=opened.pooling,
        n_ctx=opened.n_kv_cells,
        n_rows=opened.n_batch,
        n_threads=plan_threads(opened, processors.usable(), _llama_build).start.prompt,
        n_gpu_layers=_gpu_layers(opened),
        kv_type=opened.kv_type,
        use_extra_bufts=opened.use_extra_bufts,
        rope=Rope(*opened.rope),
        n_ctx_most=opened.n_ctx,
        projector_path=opened.projector_path,
    )


def _llama_build() -> str:
    from localrun.engine.native.library import library_folder

    return library_build("llama-cpp-python", library_folder())


def _gpu_layers(opened: wire.Open) -> int:
    """Layers for the GPU: none without one, as many as asked, or as many as fit. A lost one is not asked in vain."""
    from localrun.engine.native.library import gpu_free_bytes

    free_bytes = gpu_free_bytes() if opened.n_gpu_layers else None
    if free_bytes is None:
        return 0
    return opened.n_gpu_layers if opened.n_gpu_layers >= 0 else layers_that_fit(opened, free_bytes)


def layers_that_fit(opened: wire.Open, free_bytes: int) -> int:
    """Layers for the GPU, at most one more than there are (the output counts as one), by an even share of weights and
    KV."""
    n_all = opened.n_layers + 1
    per_layer = max(1, (opened.weights_bytes + opened.kv_bytes) // n_all)
    return min(n_all, int(free_bytes * USABLE_FRACTION) // per_layer)


LLAMA = Make(_llama_backend, _drafters, _llama_embedder, _llama_build)

if __name__ == "__main__":
    sys.exit(main(LLAMA))
