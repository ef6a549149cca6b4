"""A smaller model in llama.cpp as a `draft_model.DraftContext`: loaded beside the one that it drafts for.

Both must have the same vocabulary, or what the one says means something else to the other. A model with a sliding
window keeps all of its cells here, so that any part of a sequence can be removed.

Owner: the engine's main thread, after it was loaded in any.
Does not: choose what to read or say (`speculate/draft_model.py`), or know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import ne
from typing import Any

import numpy as np

from localrun.engine.backend import MemoryKind
from localrun.engine.native.context import ContextShape, LlamaContext
from localrun.engine.native.library import Threadpools, native
from localrun.engine.native.model import load_model
from localrun.engine.native.threads import FewerThreads, StepThreads
from localrun.errors import BadModelFile
from localrun.hardware.thread_choice import Threads

# As llama.cpp has it: vocabularies of one family differ in how they are padded, and in their first, special tokens.
MOST_PADDING = 128
FIRST_COMPARED = 5
# Of a batch: prompts are caught up with in pieces that streams have patience for.
MOST_ROWS = 512


@dataclass(frozen=True)
class DraftTarget:
    """The model that is drafted for, and what its backend lends a draft model.

    `shape` is the context's, and `threads` (see `LlamaContext.set_threads`) are what they should be at this moment.
    `alone` keeps everything else from computing.
    """

    model: Any
    shape: ContextShape
    is_on_gpu: bool
    use_extra_bufts: bool
    pools: Threadpools
    alone: Callable[[], AbstractContextManager[bool]]
    threads: Callable[[], tuple[Threads, FewerThreads | None]]


class LlamaDraft:
    """See the module and `draft_model.DraftContext`. It is on the GPU if the other model is, and loading ends soon when
    it is not `is_wanted` any more.

    Raises BadModelFile for a file that cannot be loaded or cannot draft, and EngineFailed as `LlamaContext`.
    """

    def __init__(self, path: str, target: DraftTarget, is_wanted: Callable[[], bool] = lambda: True) -> None:
        n_gpu_layers = -1 if target.is_on_gpu else 0
        self._model = load_model(path, n_gpu_layers, use_extra_bufts=target.use_extra_bufts, is_wanted=is_wanted)
        try:
            reason = _why_not(self._model, target.model)
            if reason:
                raise BadModelFile(f"{path} cannot draft for this model: {reason}; choose another draft model")
            self._open(target)
        except Exception:
            native.llama_model_free(self._model)
            raise

    def _open(self, target: DraftTarget) -> None:
        vocab = native.llama_model_get_vocab(self._model)
        n_tokens = int(native.llama_vocab_n_tokens(vocab))
        self.n_vocab = min(n_tokens, int(native.llama_vocab_n_tokens(native.llama_model_get_vocab(target.model))))
        self.eog_tokens = frozenset(
            token
            for token, is_eog in enumerate(map(native.llama_vocab_is_eog, repeat(vocab), range(n_tokens)))
            if is_eog
        )
        self._target = target
        self._steps, self._n_threads = StepThreads(0), 0
        self._context = LlamaContext(
            self._model, target.shape, target.pools, kind=MemoryKind.ATTENTION, n_window=0, n_vocab=n_tokens
        )
        if not target.is_on_gpu:
            self._context.give_back_cells()
        self.batch, self.n_seqs, self.n_cells = self._context.batch, self._context.n_seqs, self._context.n_cells
        self.n_ctx = min(self.n_cells // self._context.n_streams, int(native.llama_model_n_ctx_train(self._model)))

    @contextmanager
    def alone(self) -> Iterator[None]:
        threads, fewer = self._target.threads()
        if threads.decode != self._n_threads:
            self._steps, self._n_threads = StepThreads(threads.decode), threads.decode
        # How many are best for a step of this model is its own affair; the processors are the same.
        self._context.set_threads(threads, fewer and fewer._replace(steps=self._steps))
        with self._target.alone():
            yield

    def decode(self, n_rows: int) -> None:
        self._context.decode(n_rows)

    def likeliest(self, row: int) -> tuple[int, float]:
        logits = self._context.logits(row)
        token = int(logits.argmax())
        return token, 1 / float(np.exp(logits - logits[token]).sum())

    def seq_remove(self, seq: int, start: int) -> None:
        self._context.seq_remove(seq, start)

    def close(self) -> None:
        self._context.close()
        native.llama_model_free(self._model)


def _why_not(draft: Any, target: Any) -> str:
    """Why a model cannot draft for another one; empty if it can."""
    if native.llama_model_is_recurrent(draft) or native.llama_model_is_hybrid(draft):
        return "it has recurrent layers, which cannot take back what was not chosen"
    vocabularies = native.llama_model_get_vocab(draft), native.llama_model_get_vocab(target)
    kind, other_kind = map(native.llama_vocab_type, vocabularies)
    if kind != other_kind:
        return f"its tokenizer is of another kind ({kind} instead of {other_kind})"
    for name, find in (("begins", native.llama_vocab_bos), ("ends", native.llama_vocab_eos)):
        token, other = map(find, vocabularies)
        if token != other:
            return f"the token that {name} a text is {token} instead of {other}"
    n_tokens, n_other = map(native.llama_vocab_n_tokens, vocabularies)
    if abs(n_tokens - n_other) > MOST_PADDING:
        return f"its vocabulary has {n_tokens} tokens instead of {n_other}"
    compared = range(FIRST_COMPARED, min(n_tokens, n_other))
    texts, other_texts = (map(native.llama_vocab_get_text, repeat(vocab), compared) for vocab in vocabularies)
    different = next(
        (token for token, is_other in zip(compared, map(ne, texts, other_texts), strict=True) if is_other), 0
    )
    return f"its token {different} is another one" if different else ""
