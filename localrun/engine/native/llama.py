"""llama.cpp as a `backend.Backend`: a model, its vocabulary, the context that streams run in, and one for long prompts.

Owner: the engine's main thread; `tokenize` alone may run in another.

On a CPU the KV cache is split where it can be (`LlamaContext`), and long prompts are computed in a second context, in
the background (`LlamaWorker`). Its sequences are numbered from `n_seqs` on, so that a number says which context is
meant. On a GPU there is one pool, and prompts and streams go into one batch.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import (
    BASE,
    MAX_SEQUENCES,
    SNAPSHOTS,
    AdapterSet,
    Batch,
    Copy,
    Logprobs,
    MediaChunk,
    MediaRows,
    MemoryKind,
    Sampler,
    State,
)
from localrun.engine.native.adapters import LlamaAdapters
from localrun.engine.native.context import OWN_ROPE, ContextShape, LlamaContext, Rope
from localrun.engine.native.drafters import MOST_ROWS, DraftTarget, LlamaDraft, MtpHeads, has_heads
from localrun.engine.native.library import Threadpools, log_callback, native
from localrun.engine.native.media import LlamaProjector
from localrun.engine.native.model import LlamaVocabulary, load_model, tensors_of
from localrun.engine.native.pages import touch
from localrun.engine.native.sampler import LlamaSampler, SamplingThreads
from localrun.engine.native.states import StateLayout
from localrun.engine.native.threads import ComputeLock, FewerThreads, Helpers, PromptThreads, StepThreads, Usage
from localrun.engine.native.worker import LlamaWorker
from localrun.engine.sample import chain as stages
from localrun.engine.schedule.budget import tile_waste
from localrun.errors import EngineFailed, LocalrunError
from localrun.hardware import processors
from localrun.hardware.thread_choice import Threads
from localrun.wire import Adapter, Sampling, TokenLogprob

T = TypeVar("T")

log = logging.getLogger("localrun.llama")

# Of the pool beside the streams at least, besides its spare one: so many prompts may be computed there at once.
BACKGROUND_SEQUENCES = 4
# Drafted tokens of all streams that a step verifies. A row of logits is 0.6 MB with 150,000 tokens.
DRAFT_ROWS = 64
# What the snapshots of all sequences' states may take; where these are too large there are fewer.
SNAPSHOTS_BYTES = 512 << 20
# A text of fewer characters becomes tokens in less time than a step takes.
LONG_TEXT = 10_000


class LlamaBackend:
    """See the module. `n_seqs` sequences for requests, and `n_spare_seqs` for kept prefixes where they are shared.
    Without `may_split` the KV cache is one pool in any case. `samples_on_device` is what GPUs do unless told otherwise.
    With `may_draft` the model's layers for drafts are loaded, if it has some, and hybrid models keep snapshots. The
    file at `projector_path` makes rows of pictures and sound. A sequence may have as many tokens as the model was
    trained for, or `n_ctx` if that is more.

    Raises BadModelFile when llama.cpp refuses the file, EngineFailed when it cannot make a context, and what
    `LlamaProjector` does.
    """

    def __init__(
        self,
        path: str,
        *,
        n_cells: int,
        n_seqs: int,
        n_batch: int,
        n_threads: int,
        n_gpu_layers: int,
        kv_type: str,
        n_spare_seqs: int = 0,
        may_split: bool = True,
        use_extra_bufts: bool = True,
        samples_on_device: bool | None = None,
        may_draft: bool = True,
        projector_path: str = "",
        n_ctx: int = 0,
        rope: Rope = OWN_ROPE,
    ) -> None:
        native.llama_log_set(log_callback, None)
        native.llama_backend_init()
        self.n_gpu_layers = n_gpu_layers
        self._use_extra_bufts = use_extra_bufts
        tensors = tensors_of(path)
        self._has_heads = may_draft and has_heads(tensors)
        self._model = load_model(path, n_gpu_layers, use_extra_bufts=use_extra_bufts, with_heads=self._has_heads)
        self._adapters = LlamaAdapters(self._model, path)
        self._vocabulary = LlamaVocabulary(self._model)
        self.n_vocab = self._vocabulary.n_tokens
        self.n_ctx_train = int(native.llama_model_n_ctx_train(self._model))
        self._n_ctx_most, self._rope = max(n_ctx, self.n_ctx_train), rope
        has_factors = any("rope_factors_long" in name for name in tensors.names)
        self._n_short = self._original_context(tensors.architecture) if has_factors else 0
        self._n_window = int(native.llama_model_n_swa(self._model))
        self.memory_kind = self._kind_of_memory(n_cells)
        is_attention = self.memory_kind is MemoryKind.ATTENTION
        self.n_threads = n_threads
        self._n_slots, self._n_spare = n_seqs, n_spare_seqs if is_attention else 0
        self._n_cells, self._n_batch, self._kv_type = n_cells, n_batch, kv_type
        self.mixes_rows = n_gpu_layers > 0
        self._samples_on_device = self.mixes_rows if samples_on_device is None else samples_on_device
        self.n_draft_rows = DRAFT_ROWS
        self.heads: MtpHeads | None = None
        self.state_salt = b""
        # A GPU is given its graph, and waited for when somebody asks for logits.
        self.overlaps = self.mixes_rows
        self.on_compute: Callable[[], None] = lambda: None
        is_alike = self._computes_alike(n_cells)
        self.is_split = may_split and is_attention and is_alike and n_seqs > 1 and not self.mixes_rows
        self._layout: StateLayout | None = None
        self.worker: LlamaWorker | None = None
        self._threads = Threads(n_threads, n_threads)
        self._fewer: FewerThreads | None = None
        self._pools = Threadpools()
        self.turns = ComputeLock()
        self._helpers = Helpers(processors.usable().most_threads)
        self.projector: LlamaProjector | None = None
        if projector_path:
            self._open_projector(projector_path)
        self._copying = ThreadPoolExecutor(1, "copies")
        self._warming: Future[None] | None = None
        has_snapshots = may_draft and self.memory_kind is MemoryKind.HYBRID
        self._n_snapshots = self._affordable_snapshots() if has_snapshots else 0
        self._open()
        self._layout = self._probe_layout()
        self.cuts_states = is_attention and self._layout is not None
        self.state_token_bytes = self._layout.token_bytes if self._layout is not None else 0
        # Every stream is padded, so all of them may be longer than was asked for.
        if self.is_split and not (self.cuts_states and self._computes_alike(self.n_cells)):
            self.is_split = False
            self.rebuild()
        self._n_cells = self.n_cells
        self.n_ctx = min(self.n_cells, self._n_ctx_most)
        self.model_size_bytes = int(native.llama_model_size(self._model))
        self.name = "llama.cpp " + ("GPU" if self.n_gpu_layers else "CPU")
        self.eog_tokens, self.control_tokens = self._vocabulary.eog_tokens, self._vocabulary.control_tokens
        self.message_ends, self.bos_token = self._vocabulary.message_ends, self._vocabulary.bos_token
        self.piece, self.control_text = self._vocabulary.piece, self._vocabulary.control_text
        self._sampling = SamplingThreads(n_threads, self.n_vocab)

    # --- text --------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._vocabulary.tokenize(text, parse_special=parse_special)
        with self._helpers:
            return self._vocabulary.tokenize(text, parse_special=parse_special)

    # --- computing ---------------------------------------------------------------------------------------------

    def decode(self, n_rows: int, should_abort: Callable[[], bool] | None = None) -> None:
        with self.turns.step() as is_alone, nullcontext() if is_alone else self._helpers:
            self.context.decode(n_rows, None if self.overlaps else should_abort)
        if self.overlaps:
            self.on_compute()
            self.context.wait(n_rows)

    def tile_waste(self, n_rows: int) -> float:
        if self.n_gpu_layers or self._kv_type != "f16":  # of other types rows are computed one by one
            return 1.0
        return tile_waste(n_rows, int(native.llama_model_n_head(self._model)), self._threads.prompt)

    def set_chunks(self, seq: int, chunks: tuple[tuple[int, MediaChunk], ...]) -> None:
        context, seq = self._place(seq)
        context.set_chunks(seq, chunks)

    def decode_media(self, part: MediaRows) -> None:
        context, seq = self._place(part.seq)
        if context is not self.context:
            raise ValueError(f"sequence {part.seq} is not where steps are computed now")
        with self.turns.step():
            context.decode_media(part._replace(seq=seq))

    def tell(self, ring: Callable[[], None]) -> None:
        self.turns.ring = ring

    def turn_to(self, *, pool: bool) -> None:
        if pool and (self.worker is None or self.worker.is_busy):
            raise ValueError("there is no pool, or its context is computing")
        self.context = self.worker.context if pool and self.worker is not None else self.main

    @property
    def batch(self) -> Batch:
        return self.context.batch

    @property
    def pool_spare(self) -> int:
        assert self.worker is not None
        return self.n_seqs + self.worker.n_seqs

    def use(self, adapters: AdapterSet) -> None:
        self.context.use(adapters)

    def load_adapter(self, adapter: Adapter) -> None:
        with self._helpers:
            self._adapters.load(adapter)

    def leave_adapter(self, digest: bytes) -> bool:
        background = self.worker
        if background is not None and background.context.uses(digest):
            if background.is_busy:
                return False
            background.use(BASE)
        if self.main.uses(digest):
            self.main.use(BASE)
        return True

    def free_adapter(self, digest: bytes) -> None:
        self._adapters.free(digest)

    def sampler(self, sampling: Sampling, *, ignore_eos: bool) -> LlamaSampler:
        banned = np.array(sorted(self.eog_tokens) if ignore_eos else [], np.int64)
        chain = stages.chain(sampling, n_ctx=self.n_ctx)
        new_dry = self._vocabulary.dry
        return LlamaSampler(self.draw, self.logits, chain, banned=banned, n_vocab=self.n_vocab, new_dry=new_dry)

    def learn(self, sampling: Sampling) -> None:
        dry = stages.dry_of(sampling, self.n_ctx)
        if dry is not None:
            self._vocabulary.learn_dry(dry)

    def expect(self, seq: int, sampler: Sampler, *, wants_logprobs: bool) -> None:
        if self._samples_on_device:
            assert isinstance(sampler, LlamaSampler)
            self.main.expect(seq, is_whole=wants_logprobs or sampler.needs_all_logits)

    def is_finite(self, row: int) -> bool:
        return self.context.is_finite(row)

    def sample(self, wanted: Sequence[tuple[Sampler, int]]) -> list[int]:
        if wanted:
            self.context.sort_outputs(wanted[0][1])
        return self._sampling.sample(wanted)

    def logits(self, row: int) -> Any:
        """The logits of a row of the last decode, float32, as a view of native memory. Raises ValueError without."""
        return self.context.logits(row)

    def draw(self, chain: Any | None, row: int) -> int:
        """The next token by a native chain, which remembers it; the likeliest one without a chain. `DEAD_END` and
        `UNKNOWN` as `LlamaContext.likeliest`."""
        context = self.context
        if chain is None:
            return context.likeliest(row)
        return context.problem(row) or context.known(int(native.llama_sampler_sample(chain, context.native, row)))

    def logprobs(self, row: int, token: int, n_top: int) -> tuple[float, tuple[TokenLogprob, ...]]:
        return self._logprobs(self.logits(row), token, n_top)

    def hold_logprobs(self, row: int) -> Logprobs:
        return partial(self._logprobs, self.logits(row).copy())

    def _logprobs(
        self, row_logits: NDArray[np.float32], token: int, n_top: int
    ) -> tuple[float, tuple[TokenLogprob, ...]]:
        logits = row_logits.astype(np.float64)
        logits -= logits.max()
        logprobs = logits - np.log(np.exp(logits).sum())
        n_top = min(n_top, self.n_vocab)
        best = np.argpartition(-logprobs, n_top - 1)[:n_top] if n_top else np.empty(0, np.int64)
        best = best[np.argsort(-logprobs[best], kind="stable")]
        top = tuple(TokenLogprob(int(other), self.piece(int(other)), float(logprobs[other])) for other in best)
        return float(logprobs[token]), top

    # --- threads -----------------------------------------------------------------------------------------------

    def set_threads(self, threads: Threads, *, may_use_fewer: bool = False) -> None:
        """For everything from now on; nothing may be being computed. See `LlamaContext.set_threads`."""
        self._threads, self._fewer = threads, None
        if may_use_fewer and threads.most > 1:
            self._fewer = FewerThreads(
                StepThreads(threads.decode), PromptThreads(_usage, processors.unused_now), self._helpers
            )
        self.n_threads = threads.decode
        self.main.set_threads(threads, self._fewer)
        if self.worker is not None:
            self.worker.context.set_threads(threads, self._fewer)
        if self.heads is not None:
            self.heads.set_threads(threads)

    @contextmanager
    def measured_context(self, n_threads: int, *, n_cells: int, n_seqs: int, n_batch: int) -> Iterator[LlamaContext]:
        """An empty context for whoever wants to measure; it must end before the backend."""
        context = self._context(ContextShape(n_cells, n_seqs, n_batch, n_threads, self._kv_type, is_split=False))
        try:
            yield context
        finally:
            context.close()

    # --- drafts ------------------------------------------------------------------------------------------------

    def open_draft(self, path: str, is_wanted: Callable[[], bool] = lambda: True) -> LlamaDraft:
        """A smaller model that drafts for this one, with as much room; to be closed before the backend. May be called
        in a thread beside the steps, which leave it a processor. Raises as `LlamaDraft`."""
        n_batch, n_threads = min(self._n_batch, MOST_ROWS), self._threads.most
        target = DraftTarget(
            model=self._model,
            shape=ContextShape(self._n_cells, self._n_slots, n_batch, n_threads, self._kv_type, is_split=self.is_split),
            is_on_gpu=self.n_gpu_layers > native.llama_model_n_layer(self._model),
            use_extra_bufts=self._use_extra_bufts,
            pools=self._pools,
            alone=self.turns.step,
            threads=lambda: (self._threads, self._fewer),
        )
        with self._helpers:
            return LlamaDraft(path, target, is_wanted)

    # --- memory ------------------------------------------------------------------------------------------------

    def seq_share(self, source: int, target: int, start: int, end: int) -> None:
        context, own_source = self._place(source)
        to_context, own_target = self._place(target)
        if context is not to_context:
            raise ValueError(f"sequences {source} and {target} are in different contexts")
        context.seq_share(own_source, own_target, start, end)

    def seq_remove(self, seq: int, start: int, end: int = -1) -> bool:
        context, seq = self._place(seq)
        return context.seq_remove(seq, start, end)

    def state_get(self, seq: int, *, limit_bytes: int) -> bytearray | None:
        context, seq = self._place(seq)
        return context.state_get(seq, limit_bytes=limit_bytes)

    def state_slices(self, seq: int, ranges: list[tuple[int, int]]) -> Iterator[State]:
        context, seq = self._place(seq)
        return context.state_slices(self._cut, seq, ranges)

    def save(self, seq: int, ranges: list[tuple[int, int]]) -> Copy:
        context, seq = self._place(seq)
        return context.save(self._cut, seq, ranges, self._help)

    def state_join(self, seq: int, pieces: list[tuple[State, int, int, int]]) -> State:
        context, _ = self._place(seq)
        return context.state_join(self._cut, pieces)

    def state_set(self, seq: int, state: State) -> bool:
        context, seq = self._place(seq)
        return context.state_set(seq, state)

    def seq_copy(self, source: int, target: int) -> bool:
        from_context, from_seq = self._place(source)
        to_context, to_seq = self._place(target)
        is_copied = to_context.state_set(to_seq, from_context.state_for(self._cut, from_seq, to_context.n_streams))
        from_context.buffer.trim()
        return is_copied

    def warm(self, seq: int, n_tokens: int, *, moves: bool = False) -> bool:
        context, own_seq = self._place(seq)
        through = context
        if moves and self.worker is not None:
            through = self.worker.context if context is self.main else self.main
        size = self._cut.size_bytes(n_tokens, n_streams=through.n_streams) + self._cut.head_bytes(context.n_streams)
        memory = [*context.untouched(own_seq, n_tokens), *through.buffer.untouched(size)]
        if memory:
            self._warming = self._help(lambda: touch(memory))
        return self._warming is None or self._warming.done()

    def rebuild(self) -> None:
        self._close_contexts()
        self._open()

    def close(self) -> None:
        self._sampling.close()
        self._copying.shutdown()
        self._close_contexts()
        self._close_model()

    # --- opening -----------------------------------------------------------------------------------------------

    def _help(self, call: Callable[[], T]) -> Future[T]:
        """Call it in the thread for copies, which the steps leave a processor."""

        def called() -> T:
            with self._helpers:
                return call()

        return self._copying.submit(called)

    @property
    def _cut(self) -> StateLayout:
        if self._layout is None:
            raise ValueError("the states of this model cannot be cut")
        return self._layout

    def _place(self, seq: int) -> tuple[LlamaContext, int]:
        """The context of a sequence, and its number there."""
        if seq < self.n_seqs or self.worker is None:
            return self.main, seq
        if self.worker.is_busy:
            raise ValueError(f"sequence {seq} is being computed in the background")
        return self.worker.context, seq - self.n_seqs

    def _kind_of_memory(self, n_cells: int) -> MemoryKind:
        if native.llama_model_is_recurrent(self._model):
            return MemoryKind.RECURRENT
        if native.llama_model_is_hybrid(self._model):
            return MemoryKind.HYBRID
        # A window that no sequence can outgrow hides nothing.
        if 0 < self._n_window < min(n_cells, self._n_ctx_most):
            return MemoryKind.WINDOW
        return MemoryKind.ATTENTION

    def _computes_alike(self, n_cells: int) -> bool:
        """Whether streams and a pool of so many cells are computed alike: they are contexts of different lengths, in
        which some models embed positions in different ways (`_original_context`)."""
        return not self._n_short or n_cells <= self._n_short

    def _original_context(self, architecture: str) -> int:
        """Where a context for longer sequences takes other factors for its positions (LongRoPE)."""
        text = ctypes.create_string_buffer(32)
        key = f"{architecture}.rope.scaling.original_context_length"
        n_chars = native.llama_model_meta_val_str(self._model, key.encode(), text, len(text))
        return int(text.value) if n_chars > 0 else self.n_ctx_train

    def _open(self) -> None:
        split = self.is_split
        self.n_seqs = self._n_slots + (0 if split else self._n_spare)
        try:
            n_batch = self._n_batch if split else self._n_prompt_rows
            self.main = self._new_context(
                self._n_cells, self.n_seqs, n_batch, split=split, n_draft_rows=self.n_draft_rows
            )
            self.context, self.n_cells = self.main, self.main.n_cells
            if self._n_short:
                is_long = native.llama_n_ctx_seq(self.main.native) > self._n_short
                self.state_salt = b"long factors" if is_long else b"short factors"
            self.n_rollback = self.main.n_rollback
            self.heads = self._open_heads() if self._has_heads and self.n_rollback else None
            if split:
                self.worker = LlamaWorker(self._new_pool, first_seq=self.n_seqs, turns=self.turns)
        except EngineFailed:
            self._close_model()
            raise

    def _open_projector(self, path: str) -> None:
        tokenize, n_threads = self._vocabulary.tokenize, self._threads.most
        try:
            self.projector = LlamaProjector(
                path, self._model, tokenize, n_threads=n_threads, uses_gpu=self.mixes_rows, turns=self.turns,
                helping=self._helpers,
            )  # fmt: skip
        except LocalrunError:
            self._close_model()
            raise

    @property
    def _n_prompt_rows(self) -> int:
        """Rows of a batch of the context that computes prompts."""
        return max(self._n_batch, self.projector.max_chunk_tokens if self.projector is not None else 0)

    def _context(self, shape: ContextShape, *, kind: MemoryKind | None = None, **more: Any) -> LlamaContext:
        return LlamaContext(
            self._model,
            shape,
            self._pools,
            kind=kind or self.memory_kind,
            n_window=self._n_window if kind is None else 0,
            n_vocab=self.n_vocab,
            adapters=self._adapters,
            **more,
        )

    def _new_context(
        self, n_cells: int, n_seqs: int, n_batch: int, *, split: bool, cb_eval: Any = None, n_draft_rows: int = 0
    ) -> LlamaContext:
        shape = ContextShape(
            n_cells,
            n_seqs,
            n_batch,
            self._threads.most,
            self._kv_type,
            is_split=split and n_seqs > 1,
            samples_on_device=self._samples_on_device and not self.is_split,
            n_draft_rows=n_draft_rows,
            n_snapshots=self._n_snapshots,
            rope=self._rope,
        )
        places = self.projector.places if self.projector is not None else None
        context = self._context(shape, cb_eval=cb_eval, places=places)
        context.set_threads(self._threads, self._fewer)
        if not self.n_gpu_layers:
            context.give_back_cells()
        return context

    def _new_pool(self, cb_eval: Any) -> LlamaContext:
        """One pool of all cells for prompts in the background, and for requests that have outgrown their streams."""
        n_seqs = min(max(self._n_slots, BACKGROUND_SEQUENCES) + 1, MAX_SEQUENCES)  # the last one is spare
        return self._new_context(
            self.n_cells, n_seqs, self._n_prompt_rows, split=False, cb_eval=cb_eval, n_draft_rows=self.n_draft_rows
        )

    def _open_heads(self) -> MtpHeads | None:
        n_threads, is_split = self._threads.most, self.main.n_streams > 1
        shape = ContextShape(
            self.n_cells, self.n_seqs, self._n_batch, n_threads, self._kv_type, is_split, rope=self._rope
        )
        try:
            context = self._context(shape, kind=MemoryKind.ATTENTION, drafts_for=self.main.native)
        except EngineFailed as error:
            log.warning("the model's layer for drafts is not used: %s", error)
            return None
        context.set_threads(self._threads)
        return MtpHeads(self._model, self.main, context)

    def _close_contexts(self) -> None:
        if self._warming is not None:
            self._warming.result()  # in their memory
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        if self.heads is not None:
            self.heads.close()
            self.heads = None
        self.main.close()

    def _close_model(self) -> None:
        if self.projector is not None:
            self.projector.close()
        self._pools.close()
        native.llama_model_free(self._model)

    def _affordable_snapshots(self) -> int:
        """How many snapshots of every sequence's state are not too large."""
        with self.measured_context(self.n_threads, n_cells=1, n_seqs=1, n_batch=1) as context:
            for column in (context.batch.token, context.batch.pos, context.batch.seq):
                column[0] = 0
            context.decode(1)
            return min(SNAPSHOTS, SNAPSHOTS_BYTES // (context.state_bytes(0) * self._n_slots))

    def _probe_layout(self) -> StateLayout | None:
        """How states are laid out, from the state of one token; None where they cannot be cut."""
        self.batch.token[0] = self.batch.pos[0] = self.batch.seq[0] = self.batch.wants_logits[0] = 0
        self.decode(1)
        state = self.state_get(0, limit_bytes=1 << 40)
        self.seq_remove(0, 0)
        return StateLayout.of(state) if state else None


def _usage() -> Usage:
    return Usage(time.perf_counter(), time.process_time(), processors.idle_s())
