"""What drafts in llama.cpp: a smaller model beside the one that it drafts for, and the model's own layers for the
tokens after the next one ("MTP", `nextn` in the files).

Owner: the engine's main thread, after it was loaded in any.
Does not: choose what to read or say (`speculate/draft_model.py`), know requests of a draft model, or support several
such layers in a row, or ones in a file of their own.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import ne
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import DecodeFailed, MemoryKind, NoRoom
from localrun.engine.native.context import ContextShape, LlamaContext
from localrun.engine.native.library import Threadpools, native
from localrun.engine.native.model import Tensors, load_model
from localrun.engine.native.threads import FewerThreads, StepThreads
from localrun.engine.request import Request
from localrun.engine.speculate.choice import MOST_DRAFTS
from localrun.errors import BadModelFile
from localrun.hardware.thread_choice import Threads
from localrun.wire import DraftSource

log = logging.getLogger("localrun.llama")

# --- a smaller model ---

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
    """A `draft_model.DraftContext`. Both models must have the same vocabulary, or what the one says means something
    else to the other. One with a sliding window keeps all of its cells here, so that any part of a sequence can be
    removed. It is on the GPU if the other model is, and loading ends soon when it is not `is_wanted` any more.

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


# --- the model's own layers ---

# The functions that give hidden states out are C++ and not promised to anybody. They are looked up by their names in
# the one version that this was tried with; without them there are no such drafts. Nor are there for other
# architectures: a layer that llama.cpp has no graph for, or not for one alone, aborts the process.
ARCHITECTURES = frozenset({"glm4moe", "qwen35", "qwen35moe"})
# A layer was trained for one token; of its third guess in a row every other one is right at best.
MOST_TOKENS = 3

_TRIED_VERSION = "0.3.36"
_SET = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
_GET = "_Z26llama_get_embeddings_nextnP13llama_context"
_GET_ROW = "_Z30llama_get_embeddings_nextn_ithP13llama_contexti"


class Hidden(NamedTuple):
    """The model's hidden states, f32[n, n_embd], after `n` tokens of a sequence from position `first` on."""

    first: int
    rows: NDArray[np.float32]


def has_heads(tensors: Tensors) -> bool:
    """Whether a file has one such layer, which can be used. It must be known before the model is loaded: llama.cpp
    leaves the layer's tensors out unless it is asked for them, and aborts when the layer is computed without."""
    n_layers = sum(name.endswith(".nextn.eh_proj.weight") for name in tensors.names)
    return tensors.architecture in ARCHITECTURES and n_layers == 1 and _is_tried()


def _is_tried() -> bool:
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    is_tried = version == _TRIED_VERSION and all(hasattr(native._lib, name) for name in (_SET, _GET, _GET_ROW))
    if not is_tried:
        log.warning("the model's layer for drafts is not used: that was not tried with llama-cpp-python %s", version)
    return is_tried


class MtpHeads:
    """Such a layer as a `Drafter`. It reads a token and the hidden state that the model had after the token before it,
    and says what comes after that token; given what it said and its own hidden state, it says the next one.

    It attends to earlier positions, so it has cells of its own, in a second context over the same model. Every row that
    the main context computes is computed here, too, in one layer instead of all (`decoded`). Rows that did not come by,
    computed in the background or restored from a state, leave a hole: the layer then begins anew behind it. That can
    only make drafts worse, and so can a wrong hidden state; the tests therefore want that drafts are right where they
    must be.

    The layer itself is computed without adapters, so that a change of them costs nothing here. It reads hidden states
    that the model computed with them, which is most of what they do: LoRAs are made for the layers before it.

    `main` computes the model, and `context` the layer, opened with `main` as its target; it belongs to the heads from
    now on. A sequence that nobody drafts for any more is not forgotten: what comes next there usually begins like it.
    """

    source = DraftSource.MTP
    n_most = MOST_TOKENS

    def __init__(self, model: Any, main: LlamaContext, context: LlamaContext) -> None:
        self.context = context
        self._main = main
        self._n_embd = int(native.llama_model_n_embd_out(model))
        self._vectors = np.zeros((context.batch.capacity, self._n_embd), np.float32)
        context.give_vectors(self._vectors)
        self._hidden: dict[int, Hidden] = {}
        self._n_held: dict[int, int] = {}
        self._is_broken = False
        library = native._lib
        set_nextn = getattr(library, _SET)
        set_nextn.restype, set_nextn.argtypes = None, [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
        self._get, self._get_row = getattr(library, _GET), getattr(library, _GET_ROW)
        self._get.restype = self._get_row.restype = ctypes.c_void_p
        self._get.argtypes, self._get_row.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int32]
        set_nextn(main.native, True, False)  # of every row
        set_nextn(context.native, True, True)  # of those that want logits

    def set_threads(self, threads: Threads) -> None:
        self.context.set_threads(threads)

    def decoded(self, n_rows: int) -> None:
        if self._is_broken:
            return
        batch, own = self._main.batch, self.context.batch
        hidden = self._view(self._get(self._main.native), n_rows)
        own.token[:n_rows], own.pos[:n_rows] = batch.token[:n_rows], batch.pos[:n_rows]
        own.seq[:n_rows], own.wants_logits[:n_rows] = batch.seq[:n_rows], 0
        states: dict[int, Hidden] = {}
        for seq in np.unique(batch.seq[:n_rows]).tolist():
            rows = np.flatnonzero(batch.seq[:n_rows] == seq)
            first = int(batch.pos[rows[0]])
            before = self._hidden_at(seq, first - 1)
            self._vectors[rows[0]] = 0 if before is None else before
            self._vectors[rows[1:]] = hidden[rows[:-1]]
            self._cut(seq, first)
            kept = rows[-1 - MOST_DRAFTS :]
            states[seq] = Hidden(int(batch.pos[kept[0]]), hidden[kept])
        if self._decode(n_rows):
            self._hidden |= states
            self._n_held |= {seq: state.first + len(state.rows) for seq, state in states.items()}

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wanted]
        going: list[int] = []
        for index, (request, n_wanted) in enumerate(wanted):
            assert request.seq is not None
            last = len(request.tokens) - 1
            before = self._hidden_at(request.seq, last - 1)
            if n_wanted > 0 and before is not None and self._n_held.get(request.seq, 0) >= last:
                self._vectors[len(going)] = before
                self._cut(request.seq, last)
                going.append(index)
        batch = self.context.batch
        while going:
            for row, index in enumerate(going):
                request, draft = wanted[index][0], drafts[index]
                assert request.seq is not None
                batch.token[row] = draft[-1] if draft else request.tokens[-1]
                batch.pos[row], batch.seq[row] = len(request.tokens) - 1 + len(draft), request.seq
                self._n_held[request.seq] = int(batch.pos[row]) + 1
            batch.wants_logits[: len(going)] = 1
            if not self._decode(len(going)):
                break
            left: list[int] = []
            for row, index in enumerate(going):
                token = self.context.likeliest(row)
                if token < 0:
                    continue
                drafts[index].append(token)
                if len(drafts[index]) < min(wanted[index][1], self.n_most):
                    self._vectors[len(left)] = self._view(self._get_row(self.context.native, row), 1)[0]
                    left.append(index)
            going = left
        return drafts

    def drop(self, request: Request) -> None:
        """See the class."""

    def close(self) -> None:
        """Free the layer's context."""
        self.context.close()

    def _view(self, address: int, n_rows: int) -> NDArray[np.float32]:
        size = n_rows * self._n_embd
        memory = (ctypes.c_float * size).from_address(address)
        return np.frombuffer(memoryview(memory), np.float32).reshape(n_rows, self._n_embd)

    def _hidden_at(self, seq: int, position: int) -> NDArray[np.float32] | None:
        hidden = self._hidden.get(seq)
        if hidden is None or not hidden.first <= position < hidden.first + len(hidden.rows):
            return None
        row: NDArray[np.float32] = hidden.rows[position - hidden.first]
        return row

    def _cut(self, seq: int, position: int) -> None:
        """The next row of a sequence stands at this position."""
        n_held = self._n_held.get(seq, 0)
        if position != n_held:
            self.context.seq_remove(seq, position if position < n_held else 0)

    def _decode(self, n_rows: int) -> bool:
        try:
            self.context.decode(n_rows)
        except (NoRoom, DecodeFailed) as error:
            if isinstance(error, DecodeFailed):
                log.warning("the model's layer for drafts is not used any more: %s", error)
                self._is_broken = True
            for seq in range(self.context.n_seqs):
                self.context.seq_remove(seq, 0)
            self._n_held.clear()
            return False
        return True
