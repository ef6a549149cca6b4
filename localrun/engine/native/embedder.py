"""llama.cpp as an `embedder.Embedder`: a model, and one context whose every row is an output.

Owner: the engine's main thread; `tokenize` alone may run in another. Pooling is done in llama.cpp's own graph, so what
comes out is what its server gives, before it normalises. Encoders have no memory: each step is one micro-batch. Models
that read from left to right have one pool of KV cells, for as many inputs as a step holds and one that goes on. Of
these one may have a projector; rows of media are computed in calls of their own.

Native code aborts the process on a bad integer, so everything is checked here first and becomes a ValueError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from localrun.engine.backend import Batch, DecodeFailed, MediaChunk, MediaRows
from localrun.engine.embedding.inputs import FloatVector, PairFormat
from localrun.engine.native.context import GGML_TYPES, OWN_ROPE, Rope, check_code, check_rows
from localrun.engine.native.library import Threadpools, last_problem, log_callback, native
from localrun.engine.native.media import LlamaProjector
from localrun.engine.native.model import LlamaVocabulary, load_model
from localrun.engine.native.rows import BatchRows, attending
from localrun.engine.native.threads import ComputeLock
from localrun.errors import EngineFailed, LocalrunError, NotSupported
from localrun.wire import Pooling

# Inputs of one step: short ones (a dozen tokens) fill the rows of a step with this many.
MAX_SEQUENCES = 64
# A recurrent state is memory for every sequence that might exist.
MAX_RECURRENT_SEQUENCES = 8

_POOLINGS = {
    Pooling.MEAN: native.LLAMA_POOLING_TYPE_MEAN,
    Pooling.CLS: native.LLAMA_POOLING_TYPE_CLS,
    Pooling.LAST: native.LLAMA_POOLING_TYPE_LAST,
    Pooling.RANK: native.LLAMA_POOLING_TYPE_RANK,
}
_NO_TOKEN = -1


class LlamaEmbedder:
    """See the module. Inputs have up to `n_ctx` tokens, or what the model was trained for if that is less, or
    `n_ctx_most` if that is more.

    Raises BadModelFile when llama.cpp refuses the file, EngineFailed when it cannot make a context, and what
    `LlamaProjector` raises of the file at `projector_path`.
    """

    def __init__(
        self,
        path: str,
        *,
        pooling: Pooling,
        n_ctx: int,
        n_rows: int,
        n_threads: int,
        n_gpu_layers: int = 0,
        kv_type: str = "f16",
        use_extra_bufts: bool = True,
        rope: Rope = OWN_ROPE,
        n_ctx_most: int = 0,
        projector_path: str = "",
    ) -> None:
        native.llama_log_set(log_callback, None)
        native.llama_backend_init()
        self._model = load_model(path, n_gpu_layers, use_extra_bufts=use_extra_bufts)
        self._vocabulary = LlamaVocabulary(self._model)
        self.pooling = pooling
        self.n_vocab = self._vocabulary.n_tokens
        self.n_ctx_train = int(native.llama_model_n_ctx_train(self._model))
        self.n_ctx = min(n_ctx, max(self.n_ctx_train, n_ctx_most))
        self.n_rows = n_rows
        self.n_threads, self.n_gpu_layers = n_threads, n_gpu_layers
        self.model_size_bytes = int(native.llama_model_size(self._model))
        self.name = f"llama.cpp {'GPU' if n_gpu_layers else 'CPU'}, embeddings"
        self.control_tokens = self._vocabulary.control_tokens
        self.tokenize = self._vocabulary.tokenize
        self.piece, self.control_text = self._vocabulary.piece, self._vocabulary.control_text
        is_stateful = native.llama_model_is_recurrent(self._model) or native.llama_model_is_hybrid(self._model)
        self.n_seqs = MAX_RECURRENT_SEQUENCES if is_stateful else MAX_SEQUENCES
        self._turns = ComputeLock()
        self.projector = self._open_projector(projector_path) if projector_path else None
        self._context = self._open(kv_type, rope)
        self._pools = Threadpools()
        self._pools.use(self._context, n_threads)
        self._memory = native.llama_get_memory(self._context)
        self.can_split = bool(self._memory) and bool(native.llama_get_causal_attn(self._context))
        self.n_cells = int(native.llama_n_ctx(self._context)) if self._memory else 0
        self.batch = Batch(int(native.llama_n_batch(self._context)))
        self.n_rows = min(self.n_rows, self.batch.capacity)
        places = self.projector.places if self.projector is not None else None
        self._rows = BatchRows(
            self._model, self._context, self.batch, n_seqs=self.n_seqs, n_most=self.n_ctx, places=places
        )
        is_reranker = pooling is Pooling.RANK
        self.n_embd = int((native.llama_model_n_cls_out if is_reranker else native.llama_model_n_embd_out)(self._model))
        self.affixes = self._find_affixes()
        self.pair_format = self._find_pair_format()

    def tell(self, ring: Callable[[], None]) -> None:
        self._turns.ring = ring

    def compute(self, n_rows: int) -> None:
        check_rows(self.batch, n_rows, n_vocab=self.n_vocab, n_seqs=self.n_seqs, n_most=self.n_ctx)
        if self._rows.has_parts:
            self._rows.find_positions(n_rows)
        self._rows.tokens.n_tokens = n_rows
        self._decode(self._rows.tokens)

    def set_chunks(self, seq: int, chunks: tuple[tuple[int, MediaChunk], ...]) -> None:
        self._check_seq(seq)
        self._rows.set_chunks(seq, chunks)

    def compute_media(self, part: MediaRows) -> None:
        self._check_seq(part.seq)
        self._rows.check_media(part)
        fields = self._rows.media(part)
        self.batch.wants_logits[: part.n_rows] = 1
        with attending(self._context, part.chunk):
            self._decode(fields)

    def _decode(self, rows: Any) -> None:
        with self._turns.step():
            check_code(native.llama_decode(self._context, rows), rows.n_tokens)

    def vector(self, seq: int) -> FloatVector:
        pointer = native.llama_get_embeddings_seq(self._context, seq)
        if not pointer:
            raise DecodeFailed(f"sequence {seq} has no embedding", is_fatal=True)
        values = (ctypes.c_float * self.n_embd).from_address(ctypes.addressof(pointer.contents))
        return np.frombuffer(memoryview(values), np.float32).copy()

    def forget(self, seq: int) -> None:
        self.set_chunks(seq, ())
        if self._memory:
            native.llama_memory_seq_rm(self._memory, seq, 0, -1)

    def wipe(self) -> None:
        if self._memory:
            native.llama_memory_clear(self._memory, True)

    def close(self) -> None:
        native.llama_free(self._context)
        self._pools.close()
        self._close_model()

    def _check_seq(self, seq: int) -> None:
        if not 0 <= seq < self.n_seqs:
            raise ValueError(f"sequence {seq} is not below {self.n_seqs}")

    def _close_model(self) -> None:
        if self.projector is not None:
            self.projector.close()
        native.llama_model_free(self._model)

    # --- opening -----------------------------------------------------------------------------------------------

    def _open_projector(self, path: str) -> LlamaProjector:
        try:
            return LlamaProjector(
                path, self._model, self._vocabulary.tokenize, n_threads=self.n_threads,
                uses_gpu=self.n_gpu_layers > 0, turns=self._turns, helping=nullcontext(),
            )  # fmt: skip
        except LocalrunError:
            native.llama_model_free(self._model)
            raise

    def _open(self, kv_type: str, rope: Rope) -> Any:
        """A context in which the longest input of an encoder is one micro-batch; where the model reads from left to
        right, one with cells for a step and for an input that goes on. Which of the two it is, a context has to tell:
        a first one, as small as they come, is asked."""
        params = native.llama_context_default_params()
        params.embeddings = True
        params.pooling_type = _POOLINGS[self.pooling]
        params.n_threads = params.n_threads_batch = self.n_threads
        params.type_k = params.type_v = GGML_TYPES[kv_type]
        params.kv_unified = params.swa_full = params.no_perf = True
        rope.apply(params)
        params.n_ctx = params.n_batch = params.n_ubatch = params.n_seq_max = 1
        first = self._new_context(params)
        is_whole = not native.llama_get_memory(first) or not native.llama_get_causal_attn(first)
        native.llama_free(first)
        n_rows = max(self.n_rows, self.n_ctx) if is_whole else self.n_rows
        if self.projector is not None:
            if is_whole:  # text and media would have to be in one batch, and llama.cpp has no such
                self._close_model()
                raise NotSupported("this model reads in both directions, and takes text only")
            n_rows = max(n_rows, self.projector.max_chunk_tokens)
        # The graph is reserved for rows that are shared evenly among all sequences, and llama.cpp aborts where the
        # place for outputs is less than that.
        n_rows = -(-n_rows // self.n_seqs) * self.n_seqs
        params.n_batch = params.n_ubatch = n_rows
        params.n_ctx = self.n_ctx + n_rows
        params.n_seq_max = self.n_seqs
        return self._new_context(params)

    def _new_context(self, params: Any) -> Any:
        context = native.llama_init_from_model(self._model, params)
        if not context:
            self._close_model()
            raise EngineFailed(f"llama.cpp cannot make a context for embeddings: {last_problem()}")
        return context

    def _find_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the tokenizer puts before and after a text: found by letting it do so to one."""
        bare = self._vocabulary.tokenize("a", parse_special=False)
        whole = self._vocabulary.tokenize_whole("a")
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return tuple(whole[:start]), tuple(whole[start + len(bare) :])
        return (), ()

    def _find_pair_format(self) -> PairFormat:
        """The file's own template for pairs, else the order of special tokens that llama.cpp's server has."""
        template = native.llama_model_chat_template(self._model, b"rerank")
        vocab = native.llama_model_get_vocab(self._model)
        bos, eos, sep = (
            int(find(vocab)) for find in (native.llama_vocab_bos, native.llama_vocab_eos, native.llama_vocab_sep)
        )
        if eos == _NO_TOKEN:
            eos = sep
        before = (bos,) if native.llama_vocab_get_add_bos(vocab) else ()
        after = (eos,) if native.llama_vocab_get_add_eos(vocab) else ()
        between = (*after, sep) if native.llama_vocab_get_add_sep(vocab) else after
        return PairFormat(before, between, after, template.decode("utf-8", "replace") if template else None)
