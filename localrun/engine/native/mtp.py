"""The model's own layers for the tokens after the next one ("MTP", `nextn` in the files), as a `Drafter`.

Such a layer reads a token and the hidden state that the model had after the token before it, and says what comes after
that token; given what it said and its own hidden state, it says the next one. It attends to earlier positions, so it
has cells of its own, in a second context over the same model. Every row that the main context computes is computed
here, too, in one layer instead of all (`decoded`). Rows that did not come by, computed in the background or restored
from a state, leave a hole: the layer then begins anew behind it. That can only make drafts worse, and so can a wrong
hidden state; the tests therefore want that drafts are right where they must be.

The layer itself is computed without adapters, so that a change of them costs nothing here. It reads hidden states that
the model computed with them, which is most of what they do: LoRAs are made for the layers before it.

The functions that give hidden states out are C++ and not promised to anybody. They are looked up by their names in the
one version that this was tried with; without them there are no such drafts.

Does not: support several such layers in a row, or ones in a file of their own.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import DecodeFailed, NoRoom
from localrun.engine.native.context import LlamaContext
from localrun.engine.native.library import native
from localrun.engine.native.model import Tensors
from localrun.engine.request import Request
from localrun.engine.speculate.choice import MOST_DRAFTS
from localrun.hardware.thread_choice import Threads
from localrun.wire import DraftSource

log = logging.getLogger("localrun.llama")

# What this was tried with. A layer that llama.cpp has no graph for, or not for one alone, aborts the process.
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
    """See the module. `main` computes the model, and `context` the layer, opened with `main` as its target; it belongs
    to the heads from now on.

    A sequence that nobody drafts for any more is not forgotten: what comes next there usually begins like it.
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
