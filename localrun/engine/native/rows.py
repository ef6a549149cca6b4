"""The rows of a context's batch: tokens, or rows of media in their place, and where they stand.

Callers count tokens; where the model numbers positions in another way, they are looked up here.

Owner: whoever owns the context.
Invariant: what native code would abort on, or be silently wrong about, is a ValueError.
Does not: compute them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import Batch, MediaChunk, MediaRows
from localrun.engine.native.library import native
from localrun.wire import MediaKind

# The parts (t, y, x, z) of each row's position, of a chunk that begins at this one.
Places = Callable[[MediaChunk, int], NDArray[np.int32]]
# Of models whose positions have such parts (M-RoPE).
_ROPES_IN_PARTS = (native.LLAMA_ROPE_TYPE_MROPE, native.LLAMA_ROPE_TYPE_IMROPE)


# The engine counts tokens: row number i of a sequence is its *index*, and takes a cell. Most models number positions
# the same way. For some that see (M-RoPE) a picture of twelve rows has four positions, and all of its rows stand at
# the first of them, apart by x and y; so behind it, positions are behind indices.

# More than any context has cells.
MOST_TOKENS = 1 << 30


class _Span(NamedTuple):
    """A chunk: its rows have indices [start, end), and positions [first, last)."""

    start: int
    end: int
    first: int
    last: int


class Positions:
    """Of a sequence with these chunks, each with the index of its first row. With `has_parts` all rows of a picture
    stand at one position, also where it takes as many as it has rows, being one row high or wide.

    Raises ValueError for chunks that are not in order, or that no sequence can have."""

    def __init__(self, chunks: tuple[tuple[int, MediaChunk], ...] = (), *, has_parts: bool = False) -> None:
        self._spans: list[_Span] = []
        end = n_behind = 0
        for start, chunk in chunks:
            if not end <= start < start + chunk.n_tokens <= MOST_TOKENS or not 0 < chunk.n_pos <= chunk.n_tokens:
                raise ValueError(f"a chunk of {chunk.n_tokens} rows and {chunk.n_pos} positions at index {start}")
            end = start + chunk.n_tokens
            if chunk.n_pos != chunk.n_tokens or (has_parts and chunk.media.kind is MediaKind.IMAGE):
                first = start - n_behind
                self._spans.append(_Span(start, end, first, first + chunk.n_pos))
                n_behind = end - (first + chunk.n_pos)
        # A row is behind its index by as much as the last chunk before it ends earlier.
        self._ends = np.array([span.end for span in self._spans], np.int64)
        self._behind = np.array([0, *(span.end - span.last for span in self._spans)], np.int32)

    def __bool__(self) -> bool:
        """Whether positions and indices differ."""
        return bool(self._spans)

    def is_inside(self, index: int) -> bool:
        """Whether this is a row of a chunk, and not its first, whose rows have no positions of their own."""
        return any(span.start < index < span.end for span in self._spans)

    def at(self, index: int, *, behind: bool = False) -> int:
        """The position of a row. Inside of a chunk that is where the chunk begins, or the first one `behind` it."""
        n_behind = 0
        for span in self._spans:
            if index <= span.start:
                break
            if index < span.end:
                return span.last if behind else span.first
            n_behind = span.end - span.last
        return index - n_behind

    def of_rows(self, indices: NDArray[np.int32]) -> NDArray[np.int32]:
        """The positions of rows that are not inside of chunks."""
        found: NDArray[np.int32] = indices - self._behind[np.searchsorted(self._ends, indices, side="right")]
        return found

    def first_index(self, position: int) -> int:
        """The index of the first row that stands at this position."""
        return self._index(position, is_end=False)

    def index_after(self, position: int) -> int:
        """The index behind the last row that stands at this position."""
        return self._index(position, is_end=True)

    def _index(self, position: int, *, is_end: bool) -> int:
        n_behind = 0
        for span in self._spans:
            if position < span.first:
                break
            if position < span.last:
                return span.end if is_end else span.start
            n_behind = span.end - span.last
        return position + n_behind + is_end


_NO_CHUNKS = Positions()


class BatchRows:
    """See the module. `tokens` is the native batch over `batch`, and `tables` say where the chunks of each sequence
    are. `places` is a projector's; sequences have at most `n_most` rows."""

    def __init__(
        self, model: Any, context: Any, batch: Batch, *, n_seqs: int, n_most: int, places: Places | None
    ) -> None:
        self._batch, self._n_most, self._places = batch, n_most, places
        self._memory = native.llama_get_memory(context)
        self.tokens, self._batch_memory = native_batch(batch)
        self._n_embd = int(native.llama_model_n_embd_inp(model))
        self.has_parts = native.llama_model_rope_type(model) in _ROPES_IN_PARTS
        self._positions = np.zeros(4 * batch.capacity, np.int32)
        if self.has_parts:
            self.tokens.pos = self._positions.ctypes.data_as(ctypes.POINTER(native.llama_pos))
        self.tables = [_NO_CHUNKS] * n_seqs

    def set_chunks(self, seq: int, chunks: tuple[tuple[int, MediaChunk], ...]) -> None:
        self.tables[seq] = Positions(chunks, has_parts=self.has_parts) if chunks else _NO_CHUNKS

    def find_positions(self, n_rows: int) -> None:
        """Those of the first rows of `batch`, which are tokens, for a model whose positions have parts. Of some that
        leave a gap, llama.cpp would say nothing."""
        seqs, indices = self._batch.seq[:n_rows], self._batch.pos[:n_rows]
        self._positions[:n_rows] = indices
        for seq in np.unique(seqs).tolist():
            is_here = seqs == seq
            own = indices[is_here]
            self._check_follows(seq, int(own[0]))
            if table := self.tables[seq]:
                self._positions[:n_rows][is_here] = table.of_rows(own)

    def media(self, part: MediaRows) -> Any:
        """A native batch of these rows of a chunk, which were checked. Which of them are outputs is up to `batch`."""
        seq, start, chunk, rows, first, n_rows = part
        positions = self._positions
        self._batch.seq[:n_rows] = seq
        begin = self.tables[seq].at(start)
        if self.has_parts:
            assert self._places is not None
            # Part by part, each as long as this call.
            positions[: 4 * n_rows] = self._places(chunk, begin)[:, first : first + n_rows].ravel()
        else:
            positions[:n_rows] = np.arange(begin + first, begin + first + n_rows)
        fields, own = native.llama_batch(), self.tokens
        fields.n_tokens, fields.n_seq_id, fields.seq_id, fields.logits = n_rows, own.n_seq_id, own.seq_id, own.logits
        fields.pos = positions.ctypes.data_as(ctypes.POINTER(native.llama_pos))
        fields.embd = rows[first:].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return fields

    def check_media(self, part: MediaRows) -> None:
        """Raises ValueError unless these rows of a chunk can be computed."""
        seq, start, chunk, rows, first, n_rows = part
        if not 0 < n_rows <= self._batch.capacity:
            raise ValueError(f"{n_rows} rows in a batch of {self._batch.capacity}")
        if not 0 <= first <= chunk.n_tokens - n_rows or not 0 <= start <= self._n_most - chunk.n_tokens:
            raise ValueError(f"rows [{first}, {first + n_rows}) of a chunk of {chunk.n_tokens} at index {start}")
        if not chunk.is_causal and n_rows < chunk.n_tokens:
            raise ValueError(f"{n_rows} of {chunk.n_tokens} rows that attend to each other")
        if rows.shape != (chunk.n_tokens, self._n_embd) or rows.dtype != np.float32 or not rows.flags.c_contiguous:
            raise ValueError(f"rows are {rows.dtype}{rows.shape} instead of float32{(chunk.n_tokens, self._n_embd)}")
        if self.has_parts:
            if self._places is None:
                raise ValueError("without a projector nobody knows where the rows stand")
            table = self.tables[seq]
            self._check_follows(seq, start + chunk.n_tokens if table.is_inside(start + first) else start + first)

    def _check_follows(self, seq: int, index: int) -> None:
        """Raises ValueError unless a row at this index follows the last one of its sequence, if that has any."""
        position = int(native.llama_memory_seq_pos_max(self._memory, seq))
        n_held = self.tables[seq].index_after(position)
        if position >= 0 and n_held != index:
            raise ValueError(f"sequence {seq} has {n_held} tokens, and cannot go on at index {index}")


@contextmanager
def attending(context: Any, chunk: MediaChunk) -> Iterator[None]:
    """Inside of this a context computes rows of a chunk as they see each other."""
    try:
        if not chunk.is_causal:
            native.llama_set_causal_attn(context, False)
        yield
    finally:
        if not chunk.is_causal:
            native.llama_set_causal_attn(context, True)


def native_batch(batch: Batch) -> tuple[Any, tuple[NDArray[Any], ...]]:
    """A `llama_batch` over the arrays of `batch`, so that filling rows is filling numpy arrays.

    Each row's list of sequences is a pointer to its entry of `batch.seq`. The second value owns memory that the first
    points to and must live as long.
    """
    n_seq_id = np.ones(batch.capacity, np.int32)
    addresses = batch.seq.ctypes.data + np.arange(batch.capacity, dtype=np.uint64) * np.uint64(batch.seq.itemsize)
    fields = native.llama_batch()
    fields.token = batch.token.ctypes.data_as(ctypes.POINTER(native.llama_token))
    fields.pos = batch.pos.ctypes.data_as(ctypes.POINTER(native.llama_pos))
    fields.n_seq_id = n_seq_id.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    fields.seq_id = addresses.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(native.llama_seq_id)))
    fields.logits = batch.wants_logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
    return fields, (n_seq_id, addresses)


GO_ON = native.ggml_abort_callback()


@contextmanager
def giving_up(context: Any, should_abort: Callable[[], bool]) -> Iterator[None]:
    """What this native context computes inside ends before its next operation once `should_abort` says so: llama_decode
    returns `ABORTED`, and what it had computed of that micro-batch is in no sequence. Only a CPU asks, 500 times in a
    step of 30 layers, which takes 0.1 ms."""
    callback = native.ggml_abort_callback(lambda _data: should_abort())
    native.llama_set_abort_callback(context, callback, None)
    try:
        yield
    finally:
        native.llama_set_abort_callback(context, GO_ON, None)
