"""A deterministic embedder without weights: a vector is a hash of a token and of what its sequence had before it.

So a mix-up of sequences, a lost piece or a wrong position changes the result, and a test sees it. A score is made of
the same hash, between 0 and 1. The vocabulary is that of `tokens.py`: bytes and two control tokens, which also stand
around every text.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from zlib import crc32

import numpy as np

from localrun.engine.backend import Batch, MediaChunk, MediaRows
from localrun.engine.embedding.engine import EmbeddingEngine
from localrun.engine.embedding.inputs import FloatVector, PairFormat
from localrun.errors import NotSupported
from localrun.wire import Pooling
from tests.fakes.backend import FakeBackend
from tests.fakes.media import N_EMBD as N_INPUT
from tests.fakes.media import FakeProjector, contents_of
from tests.fakes.tokens import CONTROL, IM_END, IM_START

N_EMBD = 8


class FakeEmbedder:
    """See the module and `embedder.Embedder`. `is_whole` makes it one that reads in both directions."""

    name = "fake"
    n_vocab = FakeBackend.n_vocab
    n_threads = 1
    n_gpu_layers = 0
    model_size_bytes = 0
    control_tokens = tuple(CONTROL)
    affixes: tuple[tuple[int, ...], tuple[int, ...]] = ((IM_START,), (IM_END,))
    pair_format = PairFormat((IM_START,), (IM_END,), (IM_END,))

    def __init__(
        self, *, pooling: Pooling, n_ctx: int, n_rows: int = 64, n_seqs: int = 8, is_whole: bool = False,
        projector: FakeProjector | None = None,
    ) -> None:  # fmt: skip
        if projector is not None and is_whole:
            raise NotSupported("this model reads in both directions, and takes text only")
        self.projector = projector
        self.pooling = pooling
        self.n_ctx = self.n_ctx_train = n_ctx
        self.n_rows = n_rows
        self.n_seqs = n_seqs
        self.can_split = not is_whole
        self.n_cells = 0 if is_whole else n_ctx + n_rows
        self.n_embd = 1 if pooling is Pooling.RANK else N_EMBD
        n_most = n_ctx if is_whole else projector.max_chunk_tokens if projector is not None else 0
        self.batch = Batch(max(n_rows, n_most))
        self._chunks: dict[int, tuple[tuple[int, MediaChunk], ...]] = {}
        self.held: dict[int, list[int]] = {}
        self.steps: list[list[int]] = []
        self._vectors: dict[int, list[FloatVector]] = {}
        # What is computed of these tokens are no numbers, and so is all that is computed with or after them.
        self.nan_tokens: set[int] = set()
        self._is_spoiled = False
        self._tokenizer = FakeBackend(n_cells=1, n_seqs=1, n_batch=1)
        self._step_s = float(os.environ.get("LOCALRUN_FAKE_STEP_MS", "0")) / 1000

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        return self._tokenizer.tokenize(text, parse_special=parse_special)

    def piece(self, token: int) -> bytes:
        return self._tokenizer.piece(token)

    def control_text(self, token: int) -> str:
        return self._tokenizer.control_text(token)

    def tell(self, ring: Callable[[], None]) -> None:
        if self.projector is not None:
            self.projector.ring = ring

    def compute(self, n_rows: int) -> None:
        seqs = self._begin(n_rows)
        for row, seq in enumerate(seqs):
            if not 0 <= self.batch.token[row] < self.n_vocab:
                raise ValueError(f"token {self.batch.token[row]} is none of the vocabulary's")
            held = self.held.setdefault(seq, [])
            if int(self.batch.pos[row]) != len(held):
                raise ValueError(f"sequence {seq} has {len(held)} tokens, not {self.batch.pos[row]}")
            self._hold(seq, int(self.batch.token[row]))
        self._check_cells()

    def set_chunks(self, seq: int, chunks: tuple[tuple[int, MediaChunk], ...]) -> None:
        if self.held.get(seq):
            raise ValueError(f"sequence {seq} is not empty")
        self._chunks[seq] = chunks

    def compute_media(self, part: MediaRows) -> None:
        seq, start, chunk, rows, first, n_rows = part
        self.batch.seq[:n_rows] = seq
        self._begin(n_rows)
        if (start, chunk) not in self._chunks.get(seq, ()):
            raise ValueError(f"sequence {seq} has no such chunk at {start}")
        if len(self.held.get(seq, [])) != start + first:
            raise ValueError(f"sequence {seq} has {len(self.held.get(seq, []))} tokens, not {start + first}")
        if not chunk.is_causal and n_rows < chunk.n_tokens:
            raise ValueError(f"{n_rows} of {chunk.n_tokens} rows that attend to each other")
        if rows.shape != (chunk.n_tokens, N_INPUT):
            raise ValueError(f"rows are {rows.shape}")
        for content in contents_of(chunk, rows)[first : first + n_rows]:
            self._hold(seq, content)
        self._check_cells()

    def _begin(self, n_rows: int) -> list[int]:
        if not 0 < n_rows <= self.batch.capacity:
            raise ValueError(f"{n_rows} rows in a batch of {self.batch.capacity}")
        if self._step_s:
            time.sleep(self._step_s)
        self._vectors = {}
        self._is_spoiled &= bool(self.n_cells)  # encoders have no cells to keep it in
        seqs: list[int] = self.batch.seq[:n_rows].tolist()
        self.steps.append(seqs)
        return seqs

    def _hold(self, seq: int, content: int) -> None:
        held = self.held.setdefault(seq, [])
        held.append(content)
        self._is_spoiled |= content in self.nan_tokens
        self._vectors.setdefault(seq, []).append(token_vector(held, self.n_embd))

    def _check_cells(self) -> None:
        if self.n_cells and sum(map(len, self.held.values())) > self.n_cells:
            raise ValueError("more tokens than cells")

    def vector(self, seq: int) -> FloatVector:
        rows = self._vectors[seq]
        if self._is_spoiled:
            return np.full(self.n_embd, np.nan, np.float32)
        if self.pooling is Pooling.MEAN:
            mean: FloatVector = np.mean(rows, axis=0, dtype=np.float32)
            return mean
        return rows[0] if self.pooling is Pooling.CLS else rows[-1]

    def forget(self, seq: int) -> None:
        self.held.pop(seq, None)
        self._chunks.pop(seq, None)

    def wipe(self) -> None:
        self.held, self._is_spoiled = {}, False

    def close(self) -> None:
        pass


def token_vector(tokens: list[int], n_embd: int) -> FloatVector:
    """The vector of the last of these tokens."""
    digest = crc32(repr(tokens).encode())
    return np.array([(digest * (2 * at + 1) & 0xFFFF) / 0xFFFF for at in range(n_embd)], np.float32)


def check_sequences(engine: EmbeddingEngine) -> None:
    """Raises AssertionError when sequences are lost or used twice."""
    tickets = engine._turns.tickets.values()
    used = [ticket.seq for ticket in tickets if ticket.seq is not None]
    assert sorted([*used, *engine._free_seqs]) == list(range(engine._embedder.n_seqs)), "a sequence is lost or shared"
    for ticket in tickets:
        is_partial = ticket.current is not None and ticket.current.n_computed > 0
        assert is_partial == (ticket.seq is not None), "a sequence is held without need"
