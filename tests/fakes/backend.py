"""A deterministic backend without weights: the next token is a hash of the prefix that the sequence really sees.

It keeps cells of its own, places, shares and saves them as llama.cpp does, one cell at a time, and refuses what
llama.cpp would abort on. The hash runs over the tokens found in the cells that are visible to a row, so any mix-up of
sequences, a stale cell, a hole or a wrong position changes the output, and a property test sees it.

With `n_slots` it begins split: every sequence has its share of the cells for itself. A batch in the background is
computed at the `background_looks`th look at it, so that a test decides what happens in between.
Every set of adapters gives other hashes, too, and a sequence that goes on with another set than it was begun with is an
error. Of adapters whose path ends with "broken" there is nothing to load.
With a `memory_kind` other than attention a sequence is whole or nothing: no part of it can be shared, and none taken
off but for rows of the last step.

With a `FakeProjector` (`media.py`) it takes media, whose rows are hashed with their positions, too.

The vocabulary is that of `tokens.py`. What the environment says is in `serve.py`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import (
    BASE,
    SNAPSHOTS,
    AdapterSet,
    Batch,
    DecodeFailed,
    Logprobs,
    MediaChunk,
    MediaRows,
    MemoryKind,
    NoRoom,
    Sampler,
    State,
    StepAborted,
    first_undoable,
)
from localrun.engine.sample.chain import bits_at
from localrun.engine.sample.constraint import DEAD_END, Constraint
from localrun.engine.speculate.choice import MOST_DRAFTS
from localrun.errors import BadModelFile
from localrun.wire import Adapter, Sampling, TokenLogprob
from tests.fakes.media import N_EMBD, FakeProjector, contents_of
from tests.fakes.tokens import (
    CONTROL,
    CONTROL_NAMES,
    IM_END,
    IM_START,
    digest_after,
    mixed,
    next_token,
    scripted_token,
    tokenize,
)

# What a row is said to take in the background.
_ROW_S = 1e-4


@dataclass
class _Cell:
    """`before` is the digest of the tokens before this one, `adapter_hash` what it was computed with. `pos` counts
    tokens; the position is `pos - shift`."""

    pos: int
    token: int
    before: int
    adapter_hash: bytes
    seqs: set[int] = field(default_factory=set)
    shift: int = 0

    @property
    def digest(self) -> int:
        return digest_after(self.before, self.token, self.shift, self.adapter_hash)

    @property
    def entry(self) -> tuple[int, ...]:
        """As states have it."""
        return (self.pos, self.token, self.shift) if self.shift else (self.pos, self.token)


class _Slice(msgspec.Struct, array_like=True):
    """Tokens with their numbers, and with the shift of their positions if there is one, and the digest before the first
    one, for that is what they were computed after, with the adapters of `adapter_hash`."""

    before: int
    adapter_hash: bytes
    entries: list[tuple[int, ...]]


class _State(_Slice, array_like=True):
    """A sequence in the order of its cells. Only a context of as many streams takes it."""

    n_streams: int


# A seed beyond is one that the daemon drew because the client named none: tests want one answer all the same.
_LONGEST_SEED = 2**32


class FakeSampler:
    """Greedy unless a seed and a temperature are given; then bits for the token's position are mixed into the hash, and
    what a real sampler would know of earlier tokens: those that are penalized, and `mu`."""

    def __init__(self, backend: FakeBackend, sampling: Sampling, *, ignore_eos: bool) -> None:
        self._backend = backend
        is_seeded = sampling.temperature > 0 and sampling.seed is not None and abs(sampling.seed) < _LONGEST_SEED
        self._seed = sampling.seed if is_seeded else None
        self._ignore_eos = ignore_eos
        self.is_greedy = self._seed is None
        self._n_seen = 0
        self._n_window = sampling.penalty_last_n if sampling.repeat_penalty != 1 else 0
        self._recent: list[int] = []
        self.mu = 2 * sampling.mirostat_tau if sampling.mirostat else None
        self._constraint: Constraint | None = None
        self.is_closed = False
        backend.n_open_samplers += 1

    def constrain(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def accept(self, tokens: list[int], mu: float | None = None) -> None:
        self._n_seen += len(tokens)
        self._recent = [*self._recent, *tokens][-self._n_window :] if self._n_window else []
        if mu is not None:
            self.mu = mu

    def sample(self, row: int) -> int:
        return self.hold(row)()

    def hold(self, row: int) -> Callable[[], int]:
        if not self._backend.is_finite(row):
            return lambda: DEAD_END
        salt = 0
        if self._seed is not None:
            salt = bits_at(self._seed, self._n_seen) ^ crc32(f"{sorted(self._recent)} {self.mu}".encode())
        return partial(self._sample, self._backend.digests[row] ^ salt, self._backend.scripted.get(row))

    def _sample(self, digest: int, scripted: int | None) -> int:
        token = self._choose(digest, scripted)
        self.accept([token], None if self.mu is None else self.mu * 0.9 + token * 0.01)
        return token

    def _choose(self, digest: int, scripted: int | None) -> int:
        def draw(allowed: NDArray[np.int64] | None) -> int:
            if scripted is not None and (allowed is None or scripted in allowed):
                return scripted
            if allowed is None:
                return next_token(digest, ignore_eos=self._ignore_eos)
            return int(allowed[(mixed(digest) >> 20) % len(allowed)])

        if self._constraint is None:
            return draw(None)
        return self._constraint.choose(draw, tries_first=False)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._backend.n_open_samplers -= 1


class FakeWorker:
    """A `background.Worker` whose batch is over at the `background_looks`th look. Halted, half of it was computed."""

    def __init__(self, backend: FakeBackend, batch: Batch, n_seqs: int) -> None:
        self.batch, self.first_seq, self.n_seqs = batch, backend.n_seqs, n_seqs
        batch.first_seq = self.first_seq
        self.is_busy = False
        self.adapters = BASE
        self.computed_s = 0.0
        self.n_looks_left = 0
        self._backend = backend
        self._n_rows = 0
        self._compute: Callable[[int], None] = lambda n_rows: None

    def use(self, adapters: AdapterSet) -> None:
        assert not self.is_busy, "its context is computing"
        self._backend._check_adapters(adapters)
        self.adapters = adapters

    def start(self, n_rows: int) -> None:
        assert not self.is_busy, "one batch at a time"
        backend = self._backend
        backend._check_rows(self.batch, n_rows, self.adapters.hash)
        self._begin(n_rows, lambda n_rows: backend._compute(self.batch, n_rows))

    def start_media(self, part: MediaRows) -> None:
        assert not self.is_busy, "one batch at a time"
        backend, adapter_hash = self._backend, self.adapters.hash
        _check_adapters(self.batch, adapter_hash)
        contents = backend._contents(part, self._seqs, self.batch.capacity)

        def compute(n_rows: int) -> None:
            if part.chunk.is_causal or n_rows == part.chunk.n_tokens:
                backend._compute_media(part, contents[:n_rows], adapter_hash)

        self._begin(part.n_rows, compute)

    @property
    def _seqs(self) -> range:
        return range(self.first_seq, self.first_seq + self.n_seqs)

    def _begin(self, n_rows: int, compute: Callable[[int], None]) -> None:
        self.is_busy = True
        self._compute, self._n_rows, self.n_looks_left = compute, n_rows, self._backend.background_looks

    def is_finite(self, row: int) -> bool:
        return self._backend.is_finite(row)

    def is_over(self) -> bool:
        self.n_looks_left -= 1
        self._backend.ring()  # or nobody would look again
        return self.n_looks_left <= 0

    def finish(self) -> None:
        assert self.n_looks_left <= 0, "not over yet"
        self._end(self._n_rows)

    def halt(self) -> None:
        self._end(self._n_rows // 2)

    def _end(self, n_rows: int) -> None:
        self.is_busy = False
        self.computed_s = n_rows * _ROW_S
        if n_rows:
            self._compute(n_rows)


class FakeCopy:
    """A `backend.Copy` that reads the sequence at the first look, and is done at the one after that."""

    def __init__(self, backend: FakeBackend, seq: int, ranges: list[tuple[int, int]]) -> None:
        self.has_left = False
        self.states: list[State] = []
        self._read: list[State] = []
        self._backend, self._seq, self._ranges = backend, seq, ranges

    def advance(self) -> bool:
        if self.has_left:
            self.states = self._read
        else:
            self._read = list(self._backend.state_slices(self._seq, self._ranges))
            self.has_left = True
        return bool(self.states)

    def wait(self, timeout_s: float) -> None:
        pass


class FakeBackend:
    """See the module and `backend.Backend`."""

    name = "fake"
    n_vocab = 258
    n_threads = 1
    n_gpu_layers = 0
    model_size_bytes = 0
    eog_tokens = message_ends = frozenset({IM_END})
    control_tokens = tuple(CONTROL)
    bos_token: int | None = None
    overlaps = False
    state_token_bytes = 3  # a pair of integers, the smallest
    _head: int
    _is_in_pool: bool
    worker: FakeWorker | None

    def __init__(
        self,
        *,
        n_cells: int,
        n_seqs: int,
        n_batch: int,
        n_ctx_train: int = 1 << 20,
        memory_kind: MemoryKind = MemoryKind.ATTENTION,
        n_slots: int = 0,
        n_background_seqs: int = 0,
        background_looks: int = 2,
        worker: type[FakeWorker] | None = None,
        n_draft_rows: int = 64,
        projector: FakeProjector | None = None,
    ) -> None:
        self.memory_kind = memory_kind
        self.cuts_states = memory_kind is MemoryKind.ATTENTION
        self.is_split = self.cuts_states and n_slots > 1
        self.mixes_rows = not self.is_split
        self.n_cells = -(-n_cells // n_slots) * n_slots if self.is_split else n_cells
        self._n_seqs_unified, self._n_slots = n_seqs, n_slots
        self._n_background_seqs = n_background_seqs
        self.background_looks = background_looks
        self.ring: Callable[[], None] = lambda: None
        self._worker_class = worker or FakeWorker
        self._n_batch = n_batch
        self.n_ctx_train = n_ctx_train
        self.n_ctx = min(self.n_cells, n_ctx_train)
        self.n_rollback = {MemoryKind.RECURRENT: 0, MemoryKind.HYBRID: SNAPSHOTS}.get(memory_kind, MOST_DRAFTS)
        # Of a kind that is whole or nothing: how many of a sequence's rows in the last decode can be taken off again.
        self._n_undoable: dict[int, int] = {}
        self.n_draft_rows = n_draft_rows
        self.projector = projector
        self.state_salt = b""
        self.digests: dict[int, int] = {}
        self.scripted: dict[int, int | None] = {}
        self._joined = bytearray()
        self.n_open_samplers = 0
        self.adapters: dict[bytes, Adapter] = {}  # loaded
        # What is computed of these tokens, or with adapters whose files end with "nan", are no numbers.
        self.nan_tokens: set[int] = set()
        self._nan_adapters: set[bytes] = set()
        self._nan_rows: set[int] = set()
        self.used: list[bytes] = []  # the sets of all decodes
        self.n_given_up = 0
        self.n_rows_computed = self.n_media_rows_computed = 0
        self.on_compute: Callable[[], None] = lambda: None
        self.rebuild()
        self._step_s = float(os.environ.get("LOCALRUN_FAKE_STEP_MS", "0")) / 1000
        self._row_s = float(os.environ.get("LOCALRUN_FAKE_ROW_US", "0")) / 1e6
        self._late_s = 0.0
        self._is_endless = os.environ.get("LOCALRUN_FAKE_ENDLESS") == "1"
        self._takes_scripts = os.environ.get("LOCALRUN_FAKE_SCRIPTS") == "1"

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        return tokenize(text, parse_special=parse_special)

    def piece(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"token {token} is not in the vocabulary")
        return bytes([token]) if token < 256 else b""

    def control_text(self, token: int) -> str:
        return CONTROL_NAMES.get(token, "")

    def load_adapter(self, adapter: Adapter) -> None:
        if adapter.path.endswith("broken"):
            raise BadModelFile(f"the adapter {adapter.path} is broken")
        self.adapters[adapter.digest] = adapter

    def leave_adapter(self, digest: bytes) -> bool:
        worker = self.worker
        if worker is not None and any(adapter.digest == digest for adapter in worker.adapters.adapters):
            if worker.is_busy:
                return False
            worker.use(BASE)
        if any(adapter.digest == digest for adapter in self._adapters.adapters):
            self.use(BASE)
        return True

    def free_adapter(self, digest: bytes) -> None:
        del self.adapters[digest]

    def use(self, adapters: AdapterSet) -> None:
        if self._is_in_pool and self.worker is not None:
            self.worker.use(adapters)
            return
        self._check_adapters(adapters)
        self._streams_adapters = adapters

    @property
    def _adapters(self) -> AdapterSet:
        return self.worker.adapters if self._is_in_pool and self.worker is not None else self._streams_adapters

    def _check_adapters(self, adapters: AdapterSet) -> None:
        for adapter in adapters.adapters:
            if adapter.digest not in self.adapters:
                raise ValueError(f"the adapter {adapter.path} is not loaded")
            if adapter.path.endswith("nan"):
                self._nan_adapters.add(adapters.hash)

    @property
    def batch(self) -> Batch:
        return self.worker.batch if self._is_in_pool and self.worker is not None else self._batch

    def tell(self, ring: Callable[[], None]) -> None:
        self.ring = ring
        if self.projector is not None:
            self.projector.ring = ring

    def turn_to(self, *, pool: bool) -> None:
        if pool and (self.worker is None or self.worker.is_busy):
            raise ValueError("there is no pool, or its context is computing")
        self._is_in_pool = pool

    @property
    def pool_spare(self) -> int:
        """The sequence of the pool that is for copies."""
        return len(self._at) - 1

    def decode(self, n_rows: int, should_abort: Callable[[], bool] | None = None) -> None:
        self._check_rows(self.batch, n_rows, self._adapters.hash)
        self.used.append(self._adapters.hash)
        if self.overlaps:
            self.on_compute()
        began_s = time.perf_counter()
        if self._step_s:
            time.sleep(max(0.0, self._step_s + n_rows * self._row_s - self._late_s))
        if (
            should_abort is not None
            and self.memory_kind in (MemoryKind.ATTENTION, MemoryKind.WINDOW)
            and should_abort()
        ):
            self.n_given_up += 1
            # In passes before the one that it gave up.
            n_computed = self.n_given_up % n_rows if self.is_split and not self._is_in_pool else 0
            if n_computed:
                self._compute(self.batch, n_computed)
            raise StepAborted
        self._compute(self.batch, n_rows)
        # What a step took too long the next one is shorter.
        taken_s = time.perf_counter() - began_s + self._late_s
        self._late_s = min(self._step_s, max(0.0, taken_s - self._step_s - n_rows * self._row_s))

    def _check_rows(self, batch: Batch, n_rows: int, adapter_hash: bytes) -> None:
        """Raises ValueError for what native code must not see."""
        seqs = range(len(self._at) - self.n_seqs if batch.first_seq else self.n_seqs)
        if not 0 < n_rows <= batch.capacity:
            raise ValueError(f"{n_rows} rows in a batch of {batch.capacity}")
        _check_adapters(batch, adapter_hash)
        for what, values, allowed in (
            ("token", batch.token, range(self.n_vocab)),
            ("sequence", batch.seq, seqs),
            ("position", batch.pos, range(self.n_cells)),
        ):
            if any(value not in allowed for value in values[:n_rows].tolist()):
                raise ValueError(f"a {what} of the batch is not within {allowed}")
        n_outputs = len(seqs) + self.n_draft_rows
        if np.count_nonzero(batch.wants_logits[:n_rows]) > n_outputs:
            raise ValueError(f"more than {n_outputs} rows want logits")

    def _compute(self, batch: Batch, n_rows: int) -> None:
        seqs, positions = (batch.seq[:n_rows] + batch.first_seq).tolist(), batch.pos[:n_rows].tolist()
        for seq, pos in zip(seqs, positions, strict=True):
            if self._chunks.get(seq) and any(start <= pos < start + one.n_tokens for start, one in self._chunks[seq]):
                raise ValueError(f"row {pos} of sequence {seq} is one of a chunk, and not of text")
        self._place(
            seqs, positions, batch.token[:n_rows].tolist(), batch.wants_logits[:n_rows].tolist(), batch.adapter_hash
        )

    def _compute_media(self, part: MediaRows, contents: list[int], adapter_hash: bytes) -> None:
        n_rows, pos = len(contents), part.start + part.first
        wants_logits = [0] * (n_rows - 1) + [1] if n_rows else []
        self._place([part.seq] * n_rows, list(range(pos, pos + n_rows)), contents, wants_logits, adapter_hash)
        self.n_media_rows_computed += n_rows

    def _place(
        self, seqs: list[int], positions: list[int], tokens: list[int], wants_logits: list[int], adapter_hash: bytes
    ) -> None:
        self._n_undoable = {}
        lengths = {seq: len(self._at[seq]) for seq in seqs}
        for seq, pos in zip(seqs, positions, strict=True):
            if pos != lengths[seq]:
                raise DecodeFailed(f"position {pos} of sequence {seq} is not the next one", is_fatal=False)
            lengths[seq] += 1
        free = self._find_for(seqs)
        if free is None:
            raise NoRoom(f"{len(seqs)} rows, {self.n_cells - self._n_pool_used} free cells")
        self.digests, self.scripted = {}, {}
        for row, (seq, pos) in enumerate(zip(seqs, positions, strict=True)):
            cell = _Cell(pos, tokens[row], self._visible(seq, pos), adapter_hash, {seq}, self._shift(seq, pos))
            assert not pos or self._cell(seq, pos - 1).adapter_hash == adapter_hash, (
                f"sequence {seq} goes on with other adapters"
            )
            if pos and cell.token >= 0 and pos - cell.shift <= pos - 1 - self._cell(seq, pos - 1).shift:
                raise DecodeFailed(f"token {pos} of sequence {seq} is not behind the ones before it", is_fatal=False)
            self._cells[free[row]] = cell
            self._at[seq][pos] = free[row]
            if wants_logits[row]:
                self.digests[row] = cell.digest
                if self._takes_scripts:
                    self.scripted[row] = scripted_token(self.tokens_of(seq), start=IM_START, end=IM_END)
        for seq, token in zip(seqs, tokens, strict=True):
            self._note_nan(seq, token, adapter_hash)
        # Also of rows that cannot see them.
        self._nan_rows = {row for row, seq in enumerate(seqs) if self._pool_of(seq) in self._spoiled}
        self._occupy(free)
        self._n_undoable = self._undoable(Counter(seqs))
        self.n_rows_computed += len(seqs)

    def tile_waste(self, n_rows: int) -> float:
        return 1.0

    def is_finite(self, row: int) -> bool:
        if row not in self.digests:
            raise ValueError(f"row {row} has no logits")
        return row not in self._nan_rows

    def _note_nan(self, seq: int, token: int, adapter_hash: bytes) -> None:
        """A token's cell spoils all rows that are computed in its pool, or its stream, until that is made anew."""
        if token in self.nan_tokens or adapter_hash in self._nan_adapters:
            self._spoiled.add(self._pool_of(seq))

    def _pool_of(self, seq: int) -> int:
        return seq if self.is_split and seq < self.n_seqs else -1

    def set_chunks(self, seq: int, chunks: tuple[tuple[int, MediaChunk], ...]) -> None:
        self._check_seq(seq)
        self._chunks[seq] = chunks
        for pos in self._at[seq]:
            assert self._cell(seq, pos).shift == self._shift(seq, pos), f"sequence {seq} holds other chunks than these"

    def decode_media(self, part: MediaRows) -> None:
        adapter_hash = self._adapters.hash
        _check_adapters(self.batch, adapter_hash)
        seqs = range(self.n_seqs, self.pool_spare) if self._is_in_pool else range(self.n_seqs)
        contents = self._contents(part, seqs, self.batch.capacity)
        if self._step_s:
            time.sleep(self._step_s)
        self.used.append(adapter_hash)
        self._compute_media(part, contents, adapter_hash)

    def _contents(self, part: MediaRows, seqs: range, capacity: int) -> list[int]:
        """What stands for some rows of a chunk in cells. Raises ValueError for what native code must not see."""
        seq, start, chunk, rows, first, n_rows = part
        if seq not in seqs:
            raise ValueError(f"sequence {seq} of a chunk is not within {seqs}")
        if rows.shape != (chunk.n_tokens, N_EMBD) or rows.dtype != np.float32:
            raise ValueError(f"rows of {rows.shape} for a chunk of {chunk.n_tokens}")
        if not (0 < n_rows <= capacity and first >= 0 and first + n_rows <= chunk.n_tokens):
            raise ValueError(
                f"{n_rows} rows from {first} on of a chunk of {chunk.n_tokens}, at most {capacity} at once"
            )
        if not chunk.is_causal and n_rows < chunk.n_tokens:
            raise ValueError("a part of a chunk that is not causal")
        if (start, chunk) not in self._chunks.get(seq, ()):
            raise ValueError(f"sequence {seq} has no such chunk at {start}")
        return contents_of(chunk, rows)[first : first + n_rows]

    def _shift(self, seq: int, pos: int) -> int:
        """How far the position of a token is behind its number."""
        shift = 0
        for start, chunk in self._chunks.get(seq, ()):
            if start + chunk.n_tokens <= pos:
                shift += chunk.n_tokens - chunk.n_pos
            elif start < pos and chunk.n_pos != chunk.n_tokens:
                shift += pos - start  # all rows of such a chunk stand where it begins
        return shift

    def _is_inside(self, seq: int, *bounds: int) -> bool:
        """Whether any of these is inside of a chunk whose rows stand at one position."""
        return any(
            start < bound < start + chunk.n_tokens and chunk.n_pos != chunk.n_tokens
            for start, chunk in self._chunks.get(seq, ())
            for bound in bounds
        )

    def _undoable(self, counts: Counter[int]) -> dict[int, int]:
        """Of the last decode, which had so many rows of each sequence: as `LlamaContext` has it."""
        if self.memory_kind is MemoryKind.WINDOW:
            return dict(counts)
        seqs = list(counts)
        undoable = seqs[first_undoable(list(counts.values()), self.n_rollback) :]
        return {seq: min(counts[seq] - 1, self.n_rollback) for seq in undoable}

    def sampler(self, sampling: Sampling, *, ignore_eos: bool) -> FakeSampler:
        return FakeSampler(self, sampling, ignore_eos=ignore_eos or self._is_endless)

    def learn(self, sampling: Sampling) -> None:
        pass

    def expect(self, seq: int, sampler: Sampler, *, wants_logprobs: bool) -> None:
        self._check_seq(seq)

    def sample(self, wanted: Sequence[tuple[Sampler, int]]) -> list[int]:
        return [sampler.sample(row) for sampler, row in wanted]

    def logprobs(self, row: int, token: int, n_top: int) -> tuple[float, tuple[TokenLogprob, ...]]:
        return self._logprobs(self.digests[row], token, n_top)

    def _logprobs(self, digest: int, token: int, n_top: int) -> tuple[float, tuple[TokenLogprob, ...]]:
        logprob = -(digest % 64) / 64  # a row's own
        best = [(token + step) % 256 for step in range(n_top)]
        return logprob, tuple(TokenLogprob(other, self.piece(other), logprob - rank) for rank, other in enumerate(best))

    def hold_logprobs(self, row: int) -> Logprobs:
        digest = self.digests[row]
        return lambda token, n_top: self._logprobs(digest, token, n_top)

    def seq_share(self, source: int, target: int, start: int, end: int) -> None:
        self._check_seq(source)
        self._check_seq(target)
        if self.is_split and min(source, target) < self.n_seqs:
            raise ValueError("split streams share no cells")
        if self.memory_kind is not MemoryKind.ATTENTION:
            raise ValueError(f"sequences of {self.memory_kind} memory have no part that another can share")
        if not 0 <= start <= end <= self.n_cells:
            raise ValueError(f"positions [{start}, {end}) are not within [0, {self.n_cells})")
        if self._is_inside(source, start, end):
            raise ValueError(f"rows [{start}, {end}) of sequence {source} are parts of chunks")
        for pos in range(start, end):
            index = self._at[source][pos]
            assert pos not in self._at[target], f"position {pos} of sequence {target} would be there twice"
            cell = self._cells[index]
            assert cell is not None
            cell.seqs.add(target)
            self._at[target][pos] = index

    def seq_remove(self, seq: int, start: int, end: int = -1) -> bool:
        self._check_seq(seq)
        if not 0 <= start <= self.n_cells or not -1 <= end <= self.n_cells:
            raise ValueError(f"positions [{start}, {end}) are not within [0, {self.n_cells})")
        removed = [pos for pos in self._at[seq] if pos >= start and (end < 0 or pos < end)]
        if removed and self._is_inside(seq, start, end):
            return False
        n_undoable = self._n_undoable.get(seq, 0) if end < 0 else 0
        if self.memory_kind is not MemoryKind.ATTENTION and n_undoable < len(removed) < len(self._at[seq]):
            return False
        self._n_undoable.pop(seq, None)
        for pos in removed:
            index = self._at[seq].pop(pos)
            cell = self._cells[index]
            assert cell is not None
            cell.seqs.discard(seq)
            if not cell.seqs:
                self._cells[index] = None
                self.n_used -= 1
                if index >= self._pool_base:
                    self._head = min(self._head, index)
                    self._n_pool_used -= 1
        return True

    def state_get(self, seq: int, *, limit_bytes: int) -> bytearray | None:
        self._check_seq(seq)
        saved = [cell.entry for cell in self._cells if cell is not None and seq in cell.seqs]
        first = self._cell(seq, min(saved)[0]) if saved else _Cell(0, 0, 0, b"")
        state = bytearray(msgspec.msgpack.encode(_State(first.before, first.adapter_hash, saved, self._n_streams(seq))))
        return state if len(state) <= limit_bytes else None

    def state_set(self, seq: int, state: State) -> bool:
        self.seq_remove(seq, 0)
        try:
            saved = msgspec.msgpack.decode(bytes(state), type=_State)
        except msgspec.DecodeError:
            return False
        free = self._find_for([seq] * len(saved.entries))
        if free is None or saved.n_streams != self._n_streams(seq):
            return False
        self._occupy(free)
        before = saved.before
        for (pos, token, *shift), index in sorted(zip(saved.entries, free, strict=True)):
            self._cells[index] = cell = _Cell(pos, token, before, saved.adapter_hash, {seq}, *shift)
            assert cell.shift == self._shift(seq, pos), f"a state with other chunks than those of sequence {seq}"
            self._at[seq][pos] = index
            self._note_nan(seq, token, saved.adapter_hash)
            before = cell.digest
        return True

    def state_slices(self, seq: int, ranges: list[tuple[int, int]]) -> Iterator[State]:
        self._begin_cutting()
        self._check_seq(seq)
        for start, end in ranges:
            if not self._at[seq].keys() >= set(range(start, end)):
                raise ValueError(f"sequence {seq} has not all of the positions [{start}, {end})")
            if self._is_inside(seq, start, end):
                raise ValueError(f"rows [{start}, {end}) of sequence {seq} are parts of chunks")
        return (self._slice(seq, start, end) for start, end in ranges)

    def warm(self, seq: int, n_tokens: int, *, moves: bool = False) -> bool:
        if not self.cuts_states:
            raise ValueError("the states of this model cannot be cut")
        self._check_seq(seq)
        is_warm = n_tokens <= self._n_warm.get(seq, 0)
        self._n_warm[seq] = max(n_tokens, self._n_warm.get(seq, 0))
        return is_warm

    def save(self, seq: int, ranges: list[tuple[int, int]]) -> FakeCopy:
        self._begin_cutting()
        self._check_seq(seq)
        n_tokens = len(self._at[seq])
        if not ranges or any(not 0 <= start < end <= n_tokens for start, end in ranges):
            raise ValueError(f"sequence {seq} has {n_tokens} tokens, and not all of {ranges}")
        return FakeCopy(self, seq, ranges)

    def _slice(self, seq: int, start: int, end: int) -> State:
        cells = [self._cell(seq, pos) for pos in range(start, end)]
        return msgspec.msgpack.encode(_Slice(cells[0].before, cells[0].adapter_hash, [cell.entry for cell in cells]))

    def state_join(self, seq: int, pieces: list[tuple[State, int, int, int]]) -> bytearray:
        self._begin_cutting()
        self._check_seq(seq)
        joined: list[tuple[int, ...]] = []
        begin, digest, adapter_hash = 0, 0, b""
        for data, _, start, end in pieces:
            piece = msgspec.msgpack.decode(bytes(data), type=_Slice)
            before = piece.before
            assert not joined or adapter_hash == piece.adapter_hash, "pieces that were computed with different adapters"
            adapter_hash = piece.adapter_hash
            for entry in piece.entries:
                pos, token, *shifts = entry
                shift = shifts[0] if shifts else 0
                if pos == start and not joined:
                    begin = digest = before
                if start <= pos < end:
                    assert before == digest, "a piece that was computed after other tokens"
                    assert not joined or pos == joined[-1][0] + 1, "pieces that do not follow each other"
                    joined.append(entry)
                    digest = digest_after(digest, token, shift, adapter_hash)
                before = digest_after(before, token, shift, adapter_hash)
        self._joined = bytearray(msgspec.msgpack.encode(_State(begin, adapter_hash, joined, self._n_streams(seq))))
        return self._joined

    def seq_copy(self, source: int, target: int) -> bool:
        self._begin_cutting()
        self._check_seq(source)
        self._check_seq(target)
        if not self._at[source]:
            raise ValueError(f"sequence {source} is empty")
        (data,) = self.state_slices(source, [(0, len(self._at[source]))])
        return self.state_set(target, self.state_join(target, [(data, 0, 0, len(self._at[source]))]))

    def rebuild(self) -> None:
        split = self.is_split
        self.n_seqs = self._n_slots if split else self._n_seqs_unified
        self.n_used = self._n_pool_used = 0
        self._batch, self._is_in_pool = Batch(self._n_batch), False
        self._streams_adapters = BASE
        n_away = self._n_background_seqs if split else 0
        self.worker = self._worker_class(self, Batch(self._n_batch), n_away) if n_away else None
        n_seqs = self.n_seqs + (n_away + 1 if n_away else 0)
        # The streams' cells, if there are streams, and then those of the pool.
        self._head = self._pool_base = self.n_cells if split else 0
        self._cells: list[_Cell | None] = [None] * (self._pool_base + self.n_cells)
        self._at: list[dict[int, int]] = [{} for _ in range(n_seqs)]
        self._n_warm: dict[int, int] = {}
        self._chunks: dict[int, tuple[tuple[int, MediaChunk], ...]] = {}
        self._spoiled: set[int] = set()

    def close(self) -> None:
        pass

    def tokens_of(self, seq: int) -> list[int]:
        """What a sequence's cells hold, in order of position: for tests to compare with the books."""
        at = self._at[seq]
        found = map(self._cells.__getitem__, map(at.__getitem__, sorted(at)))
        return [cell.token for cell in found if cell is not None]

    def cells_of(self, seq: int) -> list[int]:
        """Where a sequence lies in its pool, in order of position."""
        at = self._at[seq]
        cells = list(map(at.__getitem__, sorted(at)))
        first = self._pool_base if self._pool_of(seq) < 0 else 0
        return [cell - first for cell in cells] if first else cells

    def _find_for(self, seqs: list[int]) -> list[int] | None:
        """A free cell for a new token of each sequence of the list; None if there are too few."""
        if not self.is_split or (seqs and seqs[0] >= self.n_seqs):
            return self._find(len(seqs)) if seqs else []
        size = self.n_cells // self.n_seqs
        free: dict[int, Iterator[int]] = {}
        for seq in set(seqs):
            self._check_seq(seq)
            free[seq] = (at for at in range(seq * size, (seq + 1) * size) if self._cells[at] is None)
        found = [next(free[seq], -1) for seq in seqs]
        return None if -1 in found else found

    def _find(self, count: int) -> list[int] | None:
        """Free cells for `count` tokens, one by one from the head on and once round; None if there are too few."""
        at = self._head - self._pool_base
        at = 0 if at > self._n_pool_used + 2 * count else at
        found: list[int] = []
        for _ in range(self.n_cells):
            at %= self.n_cells
            if self._cells[self._pool_base + at] is None:
                found.append(self._pool_base + at)
                if len(found) == count:
                    return found
            at += 1
        return None

    def _occupy(self, cells: list[int]) -> None:
        self.n_used += len(cells)
        if cells and cells[-1] >= self._pool_base:
            self._head = cells[-1] + 1
            self._n_pool_used += len(cells)

    def _visible(self, seq: int, pos: int) -> int:
        """The digest of everything before `pos` that `seq` sees."""
        return self._cell(seq, pos - 1).digest if pos else 0

    def _cell(self, seq: int, pos: int) -> _Cell:
        cell = self._cells[self._at[seq][pos]]
        assert cell is not None
        assert seq in cell.seqs, f"sequence {seq} points at a cell that it does not hold"
        assert cell.pos == pos, f"a cell of sequence {seq} stands at another position"
        return cell

    def _n_streams(self, seq: int) -> int:
        """Of the context that a sequence is in."""
        return self.n_seqs if self.is_split and seq < self.n_seqs else 1

    def _begin_cutting(self) -> None:
        """Raises ValueError where states cannot be cut. The last joined state is gone from now on."""
        if not self.cuts_states:
            raise ValueError("the states of this model cannot be cut")
        self._joined[:] = bytes(len(self._joined))

    def _check_seq(self, seq: int) -> None:
        if not 0 <= seq < len(self._at):
            raise ValueError(f"sequence {seq} is not below {self.n_seqs}")
        if self.worker is not None and self.worker.is_busy and seq >= self.n_seqs:
            raise ValueError(f"sequence {seq} is being computed in the background")


def _check_adapters(batch: Batch, adapter_hash: bytes) -> None:
    if batch.adapter_hash != adapter_hash:
        raise ValueError("the rows are for other adapters than those in use")
