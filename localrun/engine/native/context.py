"""One native context: cells or states of sequences, a batch, and the calls on them.

Owner: one thread at a time. Native code aborts the process on a bad integer, so every argument is checked here first
and becomes a ValueError instead.

Its KV cache is *split*, a stream of cells for every sequence, or one *unified* pool, in which sharing a prefix is a
change of metadata, and one decode is one micro-batch (`n_ubatch` equals `n_batch`), so that placement follows
`cells.py`.

What a sequence leaves in memory depends on the model (`MemoryKind`). A sliding window keeps few cells and reuses them
once they are out of sight; a recurrent layer keeps one state per sequence and overwrites it with every token. Neither
can be cut back to any earlier position, and a recurrent state is memory for every sequence that might exist. But the
rows of the last decode can be taken off again: a window still has all that the rows before them see, and for some
architectures llama.cpp keeps a snapshot of the state before each of the last rows, which is memory once more.

Does not: know the vocabulary's texts, or sample.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import (
    BASE,
    AdapterSet,
    Batch,
    DecodeFailed,
    MediaChunk,
    MediaRows,
    MemoryKind,
    NoRoom,
    State,
    StepAborted,
    first_undoable,
)
from localrun.engine.native.adapters import LlamaAdapters
from localrun.engine.native.library import Threadpools, last_problem, native, uncomputed
from localrun.engine.native.pages import AddressRange, Help, StateBuffer, StateCopy, give_back, memory_of_cells
from localrun.engine.native.rows import BatchRows, Places, attending, giving_up
from localrun.engine.native.states import StateLayout
from localrun.engine.native.threads import FewerThreads
from localrun.engine.sample.constraint import DEAD_END, UNKNOWN
from localrun.engine.speculate.choice import MOST_DRAFTS
from localrun.errors import EngineFailed
from localrun.hardware.thread_choice import Threads

GGML_TYPES = {"f16": native.GGML_TYPE_F16, "q8_0": native.GGML_TYPE_Q8_0, "q4_0": native.GGML_TYPE_Q4_0}
_ROPE_SCALINGS = {
    "": native.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
    "none": native.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": native.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": native.LLAMA_ROPE_SCALING_TYPE_YARN,
}
# A step of more rows is a prompt's: it computes more than it reads.
STREAM_ROWS = 16
# As many of the likeliest tokens of a row come from the device, where that is enough for its sampler.
DEVICE_TOP_K = 64
# What llama_decode returns for a graph that was given up.
ABORTED = 2
# The memory of a pool is touched in so many steps.
_POOL_STEPS = 16


class Rope(NamedTuple):
    """How positions are embedded, as in `wire.Open`; 0 and "" are the model's own way."""

    frequency_base: float = 0.0
    frequency_scale: float = 0.0
    scaling: str = ""
    yarn_orig_ctx: int = 0

    def apply(self, params: Any) -> None:
        """To a native context's parameters."""
        params.rope_freq_base, params.rope_freq_scale = self.frequency_base, self.frequency_scale
        params.rope_scaling_type, params.yarn_orig_ctx = _ROPE_SCALINGS[self.scaling], self.yarn_orig_ctx


OWN_ROPE = Rope()


@dataclass(frozen=True)
class ContextShape:
    """What a context is opened with. `n_cells` are shared by all sequences, or divided among them if `is_split`.

    With `samples_on_device` the likeliest tokens of a row are found where its logits were computed, and they alone come
    to the host: 64 instead of 152,000 for some vocabularies (`LlamaContext.expect`). Besides a row for each sequence,
    `n_draft_rows` of a batch may want logits. Of recurrent states `n_snapshots` are asked for, besides the current one.
    """

    n_cells: int
    n_seqs: int
    n_batch: int
    n_threads: int
    kv_type: str
    is_split: bool
    samples_on_device: bool = False
    n_draft_rows: int = 0
    n_snapshots: int = 0
    rope: Rope = OWN_ROPE

    @property
    def n_outputs(self) -> int:
        """Rows of a batch that may want logits: llama.cpp makes room for one of each sequence, whatever a batch has."""
        return max(self.n_seqs, min(self.n_seqs + self.n_draft_rows, self.n_batch))


class LlamaContext:
    """See the module. `cb_eval` is asked about the nodes of every graph, and called between pieces of it. With a native
    context that it `drafts_for` it computes only the model's layer for that (`drafters.py`). `places` is a projector's.
    Without the model's `adapters` it computes the bare model.

    What is not described here is as `Backend` has it. Callers count tokens; where the model numbers positions in
    another way, they are looked up here (`rows.py`).
    `n_rollback`: of a sequence's rows in the last decode `seq_remove` can take so many off again (`_note_snapshots`).

    Raises EngineFailed when llama.cpp cannot make the context.
    """

    def __init__(
        self,
        model: Any,
        shape: ContextShape,
        pools: Threadpools,
        *,
        kind: MemoryKind,
        n_window: int,
        n_vocab: int,
        cb_eval: Any = None,
        drafts_for: Any = None,
        adapters: LlamaAdapters | None = None,
        places: Places | None = None,
    ) -> None:
        self.kind = kind
        self._adapters, self._used = adapters, BASE
        self._lays_out = True
        self.n_seqs = shape.n_seqs
        self.n_outputs = shape.n_outputs
        self._n_window = n_window
        self.n_vocab = n_vocab
        self.n_streams = shape.n_seqs if shape.is_split else 1
        params = _params(shape, kind)
        self._is_whole = np.ones(shape.n_seqs, bool)
        # Of each sequence. Given when the context is made, for every change later has the graph built anew.
        self._device_chains = [_device_chain() for _ in range(shape.n_seqs if shape.samples_on_device else 0)]
        if self._device_chains:
            self._is_whole[:] = False
            configs = (native.llama_sampler_seq_config * shape.n_seqs)()
            for seq, chain in enumerate(self._device_chains):
                configs[seq].seq_id, configs[seq].sampler = seq, ctypes.cast(chain, ctypes.c_void_p)
            params.samplers, params.n_samplers = configs, shape.n_seqs
        if cb_eval is not None:
            params.cb_eval = cb_eval
        if drafts_for is not None:
            params.ctx_type, params.ctx_other = native.LLAMA_CONTEXT_TYPE_MTP, drafts_for
        with adapters.gate.laying_out() if adapters is not None else nullcontext():
            self.native = native.llama_init_from_model(model, params)
        if not self.native:
            self._free_chains()
            raise EngineFailed(f"llama.cpp cannot make a context of {shape.n_cells} KV cells: {last_problem()}")
        self._memory = native.llama_get_memory(self.native)
        self._has_states = kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID)
        self.n_rollback = int(native.llama_n_rs_seq(self.native)) if self._has_states else MOST_DRAFTS
        self._n_snapshots = np.zeros(shape.n_seqs, np.int64)
        self.n_cells = int(native.llama_n_ctx(self.native))
        self.batch = Batch(int(native.llama_n_batch(self.native)))
        self._rows = BatchRows(model, self.native, self.batch, n_seqs=shape.n_seqs, n_most=self.n_cells, places=places)
        self._tables = self._rows.tables
        self.buffer = StateBuffer()
        self._cells_memory: list[AddressRange] = []
        self._n_touched = [0] * shape.n_seqs
        self._pools = pools
        self._n_threads = 0
        self.set_threads(Threads(shape.n_threads, shape.n_threads))

    def set_threads(self, threads: Threads, fewer: FewerThreads | None = None) -> None:
        """For the decodes from now on; at most so many if `fewer` finds that fewer are quicker."""
        self._threads = threads
        self._fewer = fewer

    def use(self, adapters: AdapterSet) -> None:
        if adapters.hash == self._used.hash:
            return
        if self._adapters is None:
            raise ValueError("this context computes the bare model")
        self._adapters.check(adapters)
        self._adapters.apply(self.native, adapters, self._used)
        self._used, self._lays_out = adapters, True

    def uses(self, digest: bytes) -> bool:
        """Whether its rows are computed with this adapter."""
        return any(adapter.digest == digest for adapter in self._used.adapters)

    def decode(self, n_rows: int, should_abort: Callable[[], bool] | None = None) -> None:
        """Compute the first rows of `batch`. Raises NoRoom or DecodeFailed; StepAborted as `Backend.decode`."""
        n_wanted = self.check_rows(n_rows)
        if self._rows.has_parts:
            self._rows.find_positions(n_rows)
        self._rows.tokens.n_tokens = n_rows
        self._n_snapshots[:] = 0
        if self._has_states:
            should_abort = None
        with nullcontext() if should_abort is None else giving_up(self.native, should_abort):
            if self._fewer is not None and n_wanted == n_rows:
                code = self._decode_streams(n_rows, self._fewer)
            else:
                code = self._decode_prompts(self._rows.tokens)
        if should_abort is not None and code == ABORTED:
            raise StepAborted
        check_code(code, n_rows)
        if self._has_states:
            self._note_snapshots(n_rows)

    def decode_media(self, part: MediaRows) -> None:
        self.check_media(part)
        fields = self._rows.media(part)
        self.batch.wants_logits[: part.n_rows] = 0
        self.batch.wants_logits[part.n_rows - 1] = 1
        self._n_snapshots[:] = 0
        with attending(self.native, part.chunk):
            check_code(self._decode_prompts(fields), part.n_rows)

    def check_media(self, part: MediaRows) -> None:
        """Raises ValueError unless these rows of a chunk can be computed."""
        self._check_seq(part.seq)
        self._check_adapters()
        self._rows.check_media(part)

    def set_chunks(self, seq: int, chunks: tuple[tuple[int, MediaChunk], ...]) -> None:
        self._check_seq(seq)
        self._rows.set_chunks(seq, chunks)

    def _decode_prompts(self, rows: Any) -> int:
        """The rows of a native batch, unless all are of streams."""
        fewer = self._fewer
        n_threads = self._threads.decode if rows.n_tokens <= STREAM_ROWS else self._threads.prompt
        # A helper is done long before a batch of prompts, which therefore leaves it no processor.
        self._use_threads(n_threads if fewer is None else fewer.prompts.choose(n_threads))
        code = self._call(rows)
        if fewer is not None and code == 0:
            fewer.prompts.note_batch(time.perf_counter())
        return code

    def _decode_streams(self, n_rows: int, fewer: FewerThreads) -> int:
        """Every row is a stream's. What a helper disturbed says nothing about numbers of threads, nor does a graph that
        is laid out anew."""
        n_begun, is_alone = fewer.helpers.n_begun, not (fewer.helpers.n_busy or self._lays_out)
        n_threads = fewer.steps.choose(n_rows, fewer.prompts.limit(self._threads.decode))
        self._use_threads(fewer.helpers.leave(n_threads))
        began_at_s = time.perf_counter()
        code = self._call(self._rows.tokens)
        ended_at_s = time.perf_counter()
        if code == 0 and is_alone and n_begun == fewer.helpers.n_begun:
            fewer.steps.note(n_rows, ended_at_s - began_at_s)
        fewer.prompts.note_step(ended_at_s)
        return code

    def _call(self, rows: Any) -> int:
        """What `llama_decode` returns, which lays out a graph anew where something has changed."""
        if not self._lays_out or self._adapters is None:
            return int(native.llama_decode(self.native, rows))
        self._lays_out = False
        with self._adapters.gate.laying_out():
            return int(native.llama_decode(self.native, rows))

    def _note_snapshots(self, n_rows: int) -> None:
        """A decode leaves a snapshot of the state before each of a sequence's last rows, but not before its first. What
        is older stays where it is, and llama.cpp would take it for one."""
        seqs, first_rows, counts = np.unique(self.batch.seq[:n_rows], return_index=True, return_counts=True)
        order = np.argsort(first_rows)
        undoable = order[first_undoable(counts[order].tolist(), self.n_rollback) :]
        self._n_snapshots[seqs[undoable]] = np.minimum(counts[undoable] - 1, self.n_rollback)

    def give_vectors(self, vectors: NDArray[np.float32]) -> None:
        """From now on every row of `batch` comes with the row of `vectors`, which must live as long."""
        self._rows.tokens.embd = vectors.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def check_rows(self, n_rows: int) -> int:
        """Raises ValueError unless the first rows of `batch` can be computed. Returns how many want logits."""
        check_rows(self.batch, n_rows, n_vocab=self.n_vocab, n_seqs=self.n_seqs, n_most=self.n_cells)
        self._check_adapters()
        n_wanted = int(np.count_nonzero(self.batch.wants_logits[:n_rows]))
        if n_wanted > self.n_outputs:
            raise ValueError(f"more than {self.n_outputs} rows want logits")
        return n_wanted

    def give_back_cells(self) -> int:
        """Cells that nobody has used yet take no memory from now on, until somebody does. Only for an empty context on
        the CPU. Returns how many bytes that frees."""
        self._cells_memory = memory_of_cells(self.native, self.n_seqs, n_outputs=self.n_outputs)
        return give_back(self._cells_memory)

    def untouched(self, seq: int, n_tokens: int) -> list[AddressRange]:
        """The memory of the first cells of a stream, as far as nobody asked for it before. Whoever asks touches it. In
        one pool these are the cells that its sequences may have now, and so many more: new ones take the lowest."""
        self._check_seq(seq)
        if not self._cells_memory:
            return []
        if self.n_streams == 1:
            n_held = sum(int(native.llama_memory_seq_pos_max(self._memory, one)) + 1 for one in range(self.n_seqs))
            step = -(-self.n_cells // _POOL_STEPS)  # they grow meanwhile
            seq, n_tokens = 0, min(self.n_cells, -(-(n_held + n_tokens) // step) * step)
        if n_tokens <= self._n_touched[seq]:
            return []
        self._n_touched[seq] = n_tokens
        n_stream_cells = self.n_cells // self.n_streams
        parts = []
        for begin, size in self._cells_memory:
            stream_bytes = size // self.n_streams
            parts.append(
                AddressRange(begin + seq * stream_bytes, stream_bytes * min(n_tokens, n_stream_cells) // n_stream_cells)
            )
        return parts

    def expect(self, seq: int, *, is_whole: bool) -> None:
        """Whether all logits of this sequence's rows are needed from now on, where its device has a choice. A change
        has the graph built anew."""
        self._check_seq(seq)
        if self._device_chains and is_whole != self._is_whole[seq]:
            self._is_whole[seq], self._lays_out = is_whole, True
            if is_whole:
                native.llama_set_sampler(self.native, seq, None)
                return
            # A chain can be given to a context only once.
            native.llama_sampler_free(self._device_chains[seq])
            self._device_chains[seq] = _device_chain()
            native.llama_set_sampler(self.native, seq, self._device_chains[seq])

    def wait(self, n_rows: int) -> None:
        """Until what is wanted of these rows is there. Raises DecodeFailed when the device says only now that it was
        not computed."""
        if self.batch.wants_logits[:n_rows].any():
            native.llama_synchronize(self.native)
        if said := uncomputed():
            raise DecodeFailed(f"the device did not compute the rows: {said}", is_fatal=True)

    def sort_outputs(self, row: int) -> None:
        """The first look at a decode's outputs puts them in order, for all threads."""
        native.llama_get_logits_ith(self.native, row)

    def is_finite(self, row: int) -> bool:
        """Whether what was computed for a row of the last decode are numbers."""
        return self.problem(row) != DEAD_END

    def problem(self, row: int) -> int:
        """Why no token can be drawn from a row of the last decode: `DEAD_END` if its logits are no numbers, `UNKNOWN`
        if what a device found of it cannot be; 0 if nothing is wrong."""
        logits = self.logits(row) if self._is_whole[self.batch.seq[row]] else self._left_logits(row)
        if not logits.size:
            return UNKNOWN
        return 0 if are_numbers(logits) else DEAD_END

    def likeliest(self, row: int) -> int:
        """The token with the highest logit of a row of the last decode, or `problem`."""
        is_whole = self._is_whole[self.batch.seq[row]]
        logits = self.logits(row) if is_whole else self._left_logits(row)
        if not logits.size:
            return UNKNOWN
        best = int(logits.argmax())  # of numbers that are none the first, if there is one
        if not np.isfinite(logits[best]):
            return DEAD_END
        if is_whole:
            return best
        return self.known(int(native.llama_get_sampled_candidates_ith(self.native, row)[best]))

    def known(self, token: int) -> int:
        """A token that native code chose; `UNKNOWN` if the vocabulary has none of that number."""
        return token if 0 <= token < self.n_vocab else UNKNOWN

    def _left_logits(self, row: int) -> NDArray[np.float32]:
        """Those that the device left of a row, one for each token that it found; none if their numbers differ. One that
        cannot look for the likeliest leaves them all, and names no tokens: their numbers are their places."""
        n_found = int(native.llama_get_sampled_logits_count_ith(self.native, row))
        n_named = int(native.llama_get_sampled_candidates_count_ith(self.native, row)) or self.n_vocab
        if not 0 < n_found == n_named <= self.n_vocab:
            return np.empty(0, np.float32)
        return np.ctypeslib.as_array(native.llama_get_sampled_logits_ith(self.native, row), (n_found,))

    def logits(self, row: int) -> NDArray[np.float32]:
        """The logits of a row of the last decode, as a view of native memory. Raises ValueError if it has none."""
        if not self._is_whole[self.batch.seq[row]]:
            raise ValueError(f"the logits of row {row} stayed on the device")
        pointer = native.llama_get_logits_ith(self.native, row)
        if not pointer:
            raise ValueError(f"row {row} has no logits")
        row_memory = (ctypes.c_float * self.n_vocab).from_address(ctypes.addressof(pointer.contents))
        return np.frombuffer(memoryview(row_memory), np.float32)

    def seq_share(self, source: int, target: int, start: int, end: int) -> None:
        self._check_seq(source)
        self._check_seq(target)
        if not 0 <= start <= end <= self.n_cells:
            raise ValueError(f"positions [{start}, {end}) are not within [0, {self.n_cells})")
        if self.kind is not MemoryKind.ATTENTION or self.n_streams > 1:
            raise ValueError(f"sequences of {self.kind} memory in {self.n_streams} streams share no cells")
        table = self._tables[source]
        native.llama_memory_seq_cp(self._memory, source, target, table.at(start), table.at(end, behind=True))

    def seq_remove(self, seq: int, start: int, end: int = -1) -> bool:
        self._check_seq(seq)
        if not 0 <= start <= self.n_cells or not -1 <= end <= self.n_cells:
            raise ValueError(f"positions [{start}, {end}) are not within [0, {self.n_cells})")
        table = self._tables[seq]
        if table.is_inside(start) or table.is_inside(end):
            return False
        start, end = table.at(start), table.at(end) if end > 0 else end
        if start > 0 and self.kind is MemoryKind.WINDOW:
            # llama.cpp would do it, also where the cells that position `start` looks back at are gone.
            oldest = native.llama_memory_seq_pos_min(self._memory, seq)
            if oldest > max(0, start - self._n_window + 1):
                return False
        if self._has_states:
            n_back = int(native.llama_memory_seq_pos_max(self._memory, seq)) + 1 - start
            if start > 0 and n_back > 0 and (end != -1 or n_back > self._n_snapshots[seq]):
                return False
            self._n_snapshots[seq] = 0
        return bool(native.llama_memory_seq_rm(self._memory, seq, start, end))

    def state_get(self, seq: int, *, limit_bytes: int) -> bytearray | None:
        size = self.state_bytes(seq)
        if size > limit_bytes:
            return None
        state = bytearray(size)
        del state[self._save(seq, state, size) :]
        return state

    def state_slices(self, layout: StateLayout, seq: int, ranges: list[tuple[int, int]]) -> Iterator[State]:
        size = self.state_bytes(seq)
        buffer = self.buffer.get(size)
        state, first = buffer[: self._save(seq, buffer, size)], self._first_index(seq)
        return self._slices(layout, state, ranges, first)

    def save(self, layout: StateLayout, seq: int, ranges: list[tuple[int, int]], help_with: Help) -> StateCopy:
        self._check_seq(seq)
        n_tokens = self._tables[seq].index_after(int(native.llama_memory_seq_pos_max(self._memory, seq)))
        if not ranges or any(not 0 <= start < end <= n_tokens for start, end in ranges):
            raise ValueError(f"sequence {seq} has {n_tokens} tokens, and not all of {ranges}")
        cut = partial(_cut, layout, ranges)
        return StateCopy(self.buffer, self.state_bytes(seq), partial(self._export, seq), cut, help_with)

    def state_join(self, layout: StateLayout, pieces: list[tuple[State, int, int, int]]) -> State:
        n_cells = pieces[-1][3] - pieces[0][2]
        buffer = self.buffer.get(layout.size_bytes(n_cells, n_streams=self.n_streams))
        return layout.join(pieces, n_streams=self.n_streams, into=buffer)

    def state_for(self, layout: StateLayout, seq: int, n_streams: int) -> State:
        """The saved state of a sequence for a context of so many streams, good until the next call of anything with
        states."""
        size = self.state_bytes(seq)
        buffer = self.buffer.get(size + layout.head_bytes(n_streams))
        return layout.for_streams(buffer, self._save(seq, buffer, size), n_streams=n_streams)

    def state_set(self, seq: int, state: State) -> bool:
        self._check_seq(seq)
        data = np.frombuffer(state, np.uint8)
        start = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        self._n_snapshots[seq] = 0
        is_read = int(native.llama_state_seq_set_data(self.native, start, data.size, seq)) == data.size > 0
        if not is_read:
            native.llama_memory_seq_rm(self._memory, seq, 0, -1)
        self.buffer.trim()
        return is_read

    def state_bytes(self, seq: int) -> int:
        """Bytes of a sequence's saved state."""
        self._check_seq(seq)
        return int(native.llama_state_seq_get_size(self.native, seq))

    def _export(self, seq: int, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The saved state of a sequence, in a buffer that is large enough."""
        return buffer[: self._save(seq, buffer, buffer.size)]

    def close(self) -> None:
        native.llama_free(self.native)
        self._free_chains()

    def _free_chains(self) -> None:
        for chain in self._device_chains:
            native.llama_sampler_free(chain)

    def _use_threads(self, n_threads: int) -> None:
        # llama.cpp has two numbers as well, but takes that for prompts wherever a batch has more than one row.
        if n_threads != self._n_threads:
            self._n_threads = n_threads
            self._pools.use(self.native, n_threads)

    def _first_index(self, seq: int) -> int:
        """A spare sequence may have a part of another one."""
        return self._tables[seq].first_index(max(0, int(native.llama_memory_seq_pos_min(self._memory, seq))))

    def _slices(
        self, layout: StateLayout, state: NDArray[np.uint8], ranges: list[tuple[int, int]], first: int
    ) -> Iterator[State]:
        try:
            for start, end in ranges:
                yield layout.slice(state, start, end, first=first)
        finally:
            self.buffer.trim()

    def _save(self, seq: int, target: bytearray | NDArray[np.uint8], size: int) -> int:
        buffer = np.frombuffer(target, np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return int(native.llama_state_seq_get_data(self.native, buffer, size, seq))

    def _check_adapters(self) -> None:
        if self.batch.adapter_hash != self._used.hash:
            raise ValueError("the rows are for other adapters than those in use")

    def _check_seq(self, seq: int) -> None:
        if not 0 <= seq < self.n_seqs:
            raise ValueError(f"sequence {seq} is not below {self.n_seqs}")


def _cut(layout: StateLayout, ranges: list[tuple[int, int]], state: NDArray[np.uint8]) -> list[State]:
    return [layout.slice(state, start, end) for start, end in ranges]


def check_code(code: int, n_rows: int) -> None:
    """What llama_decode returned. Raises NoRoom or DecodeFailed."""
    if code == 1:
        raise NoRoom(f"no {n_rows} free cells")
    if code != 0:
        raise DecodeFailed(f"llama_decode returned {code}", is_fatal=code != -1)


def check_rows(batch: Batch, n_rows: int, *, n_vocab: int, n_seqs: int, n_most: int) -> None:
    """Raises ValueError unless a batch has so many rows, all of whose values are within their limits."""
    if not 0 < n_rows <= batch.capacity:
        raise ValueError(f"{n_rows} rows in a batch of {batch.capacity}")
    for what, values, limit in (
        ("token", batch.token, n_vocab),
        ("sequence", batch.seq, n_seqs),
        ("position", batch.pos, n_most),
    ):
        if values[:n_rows].min() < 0 or values[:n_rows].max() >= limit:
            raise ValueError(f"a {what} of the batch is not within [0, {limit})")


def _params(shape: ContextShape, kind: MemoryKind) -> Any:
    params = native.llama_context_default_params()
    params.n_ctx = shape.n_cells
    params.n_batch = params.n_ubatch = shape.n_batch
    params.n_seq_max = shape.n_seqs
    # llama.cpp asserts that a decode has room for all of them.
    params.n_rs_seq = max(0, min(shape.n_snapshots, shape.n_batch - 2))
    # One row per sequence wants logits, and drafts do; the default, every row of a batch, is 300 MB at 150,000 tokens.
    params.n_outputs_max = shape.n_outputs
    params.n_outputs_max_per_seq = 1 + min(shape.n_draft_rows, MOST_DRAFTS)
    params.n_threads = params.n_threads_batch = shape.n_threads
    params.type_k = params.type_v = GGML_TYPES[shape.kv_type]
    params.kv_unified = not shape.is_split
    params.swa_full = kind is not MemoryKind.WINDOW
    params.no_perf = True
    shape.rope.apply(params)
    return params


def _device_chain() -> Any:
    """The likeliest tokens, found twice: what one stage finds can be overwritten before it reaches the host.

    Every graph has the nodes of every sequence's chain, but only results of sequences with rows in the batch are
    flagged as outputs (`build_sampling`, ggml-org/llama.cpp#19266). llama.cpp plans where tensors lie in memory, and
    keeps the plan while graphs have as many nodes; it does not compare the flags (`ggml_gallocr_needs_realloc`). A plan
    that was made for sequences 0 and 2 then serves 0 and 1: the ids that the stage of 1 found count as used up once
    their logits were fetched, the stage of 2 writes its own over them, and 1 gets the ids of 2.

    A plan gives up only tensors from which others are made. From the results of a second stage nothing is made, so they
    stay where they are, whoever is in the batch.
    """
    chain = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
    for _ in range(2):
        native.llama_sampler_chain_add(chain, native.llama_sampler_init_top_k(DEVICE_TOP_K))
    return chain


def are_numbers(logits: NDArray[np.float32]) -> bool:
    """Whether there is no NaN among them, and no infinity at their top: weights or adapters may compute such."""
    return bool(np.isfinite(logits.max()))
