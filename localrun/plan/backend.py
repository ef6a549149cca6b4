"""A `Backend` that computes nothing: it knows how long every sequence is, and lets virtual time pass; and the cache on
disk behind it, of which only the sizes are kept.

Everything that llama.cpp does beside the steps happens at a virtual time: a batch of the background goes on whenever
the clock does, but for the steps. The rest is complete when it is asked for. States have their real length and take no
memory. Tokens are numbers without text: an answer's are told before it is asked for (`says`), so that the next turn of
a conversation begins with what is in the cells, and drafts are right where the answer repeats something.

Does not: take media, or load adapters.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, NoReturn, cast

import msgspec
import numpy as np

from localrun.engine.backend import (
    BASE,
    AdapterSet,
    Batch,
    DecodeFailed,
    Logprobs,
    MemoryKind,
    Sampler,
    State,
)
from localrun.engine.cache.tree import DiskRecord
from localrun.engine.schedule.budget import tile_waste
from localrun.engine.speculate.choice import MOST_DRAFTS
from localrun.errors import NotSupported
from localrun.plan.costs import Account, Costs, VirtualClock
from localrun.wire import Sampling, TokenLogprob

# Of the batch's 32 bits; no text is longer than what is kept free.
N_TOKENS = 2**31 - 1
MOST_TOKENS = 2**24
_N_NOISE = 4093
_CELL_STEP = 256
_DRAFT_ROWS = 64
MOST_SEQUENCES = 4096
# As `native/llama.py` has them.
_BACKGROUND_SEQUENCES = 4


def tokens_of(seed: int, n_tokens: int) -> range:
    """The tokens of a text that is known by a number."""
    first = seed * 2654435761 % (N_TOKENS - MOST_TOKENS)
    return range(first, first + n_tokens)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is opened: what the scheduler and the cache see of a backend. A token's state is `state_token_bytes`
    long, and one that is not cut has `state_bytes` more. `n_heads` is 0 where rows are not computed in tiles."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=MOST_SEQUENCES)]
    n_cells: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    n_ctx_train: Annotated[int, msgspec.Meta(ge=1)]
    n_batch: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 512
    n_spare_seqs: Annotated[int, msgspec.Meta(ge=0, le=MOST_SEQUENCES)] = 0
    memory_kind: MemoryKind = MemoryKind.ATTENTION
    cuts_states: bool = True
    is_split: bool = True
    mixes_rows: bool = False
    n_gpu_layers: int = 0
    n_threads: int = 1
    n_heads: int = 0
    kv_type: str = "f16"
    state_token_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 1
    state_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0

    def with_slots(self, slots: int) -> Layout:
        """The same cells for more or fewer slots."""
        return msgspec.structs.replace(self, slots=slots, is_split=self.is_split and slots > 1).with_cells(self.n_cells)

    def with_cells(self, n_cells: int) -> Layout:
        """In whole streams, as llama.cpp pads them."""
        return msgspec.structs.replace(self, n_cells=-(-n_cells // self.least_cells) * self.least_cells)

    @property
    def least_cells(self) -> int:
        """A step of each stream."""
        return _CELL_STEP * (self.slots if self.is_split else 1)


def _nothing(*_args: object, **_options: object) -> None:
    """What takes no time and has no effect here."""


def _refuse(*_args: object, **_options: object) -> NoReturn:
    raise NotSupported("adapters, media, text and grammars are not simulated")


class SimSampler:
    """Draws the tokens that its request's answer has."""

    is_greedy = True
    mu: float | None = None
    accept = close = _nothing
    constrain = _refuse

    def __init__(self, answer: Iterable[int]) -> None:
        self._next = iter(answer)

    def sample(self, row: int) -> int:
        return next(self._next)

    def hold(self, row: int) -> Callable[[], int]:
        return lambda: self.sample(row)


class SimWorker:
    """A batch beside the steps, which is over when enough time has passed outside of them."""

    use = _nothing
    start_media = _refuse

    def __init__(self, backend: SimBackend, n_seqs: int) -> None:
        self.batch, self.first_seq, self.n_seqs = Batch(backend.layout.n_batch), backend.n_seqs, n_seqs
        self.batch.first_seq = self.first_seq
        self.is_busy = False
        self._backend, self._clock = backend, backend.clock
        self._batch_s = self._left_s = self._extra_s = self._seen_s = 0.0
        self._slowdown = 1.0
        self._n_rows = 0

    @property
    def ends_at_s(self) -> float:
        """If nothing interrupts it."""
        return self._seen_s + self._left_s * self._slowdown

    @property
    def computed_s(self) -> float:
        return self._batch_s + self._extra_s

    def interrupt(self, share: float) -> float:
        """A step waits for the piece at hand: `share` of all steps wait no longer. How much longer than by itself that
        step computes then."""
        waits = self._backend.costs.waits
        if self.is_over() or waits is None:
            return 0.0
        cold_s = waits.extra_s(self._batch_s, 0.0)
        wait_s = waits.extra_s(self._batch_s, share) - cold_s
        self._clock.spend(min(wait_s, max(0.0, self.ends_at_s - self._clock.now_s)), Account.PROMPTS)
        self.go_on()
        return cold_s

    def start(self, n_rows: int) -> None:
        seqs = self.batch.seq[:n_rows].tolist()
        runs = _runs(seqs, self.batch.pos[:n_rows].tolist())
        depth = sum(pos * n for _, pos, n in runs) / n_rows
        self._batch_s = self._backend.costs.background.batch_s(n_rows, depth) * self._backend.noise()
        self._n_rows, self._left_s, self._extra_s, self._slowdown = n_rows, self._batch_s, 0.0, 1.0
        self._seen_s, self.is_busy = self._clock.now_s, True

    def go_on(self) -> None:
        """Time has passed, and was not a step's."""
        done_s = min(self._left_s, (self._clock.now_s - self._seen_s) / self._slowdown)
        self._left_s -= done_s
        self._extra_s += done_s * (self._slowdown - 1)
        self._seen_s = self._clock.now_s

    def interrupted(self) -> None:
        """A step is over, in which it paused; now its caches are cold."""
        self._seen_s, self._slowdown = self._clock.now_s, self._backend.costs.cold

    def is_over(self) -> bool:
        if self.is_busy and self._clock.now_s > self._seen_s:
            self.go_on()
        return self._left_s <= 1e-9  # a rounding error of a long time

    def finish(self) -> None:
        self._backend.place(self.batch, self._n_rows)
        self.is_busy = False

    def is_finite(self, row: int) -> bool:
        return True

    def halt(self) -> None:
        self.is_busy = False


class SimCopy:
    """Reads the sequence at the first look, and is done at the one after that, as a thread would be."""

    wait = _nothing

    def __init__(self, backend: SimBackend, seq: int, ranges: list[tuple[int, int]]) -> None:
        self.has_left = False
        self.states: list[State] = []
        self._backend, self._seq, self._ranges = backend, seq, ranges

    def advance(self) -> bool:
        if self.has_left:
            self.states = [self._backend.state_of(end - start) for start, end in self._ranges]
        else:
            self._backend.spend_copy(self._backend.length(self._seq), self._backend.costs.copy_token_s)
            self.has_left = True
        return bool(self.states)


class SimBackend:
    """See the module and `backend.Backend`."""

    name = "simulated"
    n_vocab = N_TOKENS
    model_size_bytes = 0
    eog_tokens = message_ends = frozenset[int]()
    control_tokens: tuple[str, ...] = ()
    bos_token: int | None = None
    state_salt = b""
    n_draft_rows = _DRAFT_ROWS
    projector = None

    def __init__(self, layout: Layout, costs: Costs, clock: VirtualClock, seed: int) -> None:
        self.layout, self.costs, self.clock = layout, costs, clock
        self.memory_kind = layout.memory_kind
        self.cuts_states, self.is_split = layout.cuts_states, layout.is_split
        self.mixes_rows = self.overlaps = layout.mixes_rows
        self.n_cells, self.n_ctx_train = layout.n_cells, layout.n_ctx_train
        self.n_ctx = min(layout.n_cells, layout.n_ctx_train)
        self.n_threads, self.n_gpu_layers = layout.n_threads, layout.n_gpu_layers
        self.state_token_bytes = layout.state_token_bytes
        self.n_rollback = MOST_DRAFTS if self.memory_kind is MemoryKind.ATTENTION else 0
        self.on_compute: Callable[[], None] = lambda: None
        self.n_seqs = layout.slots + (0 if layout.is_split else layout.n_spare_seqs)
        self._chance = random.Random(seed)
        self._noise = [self._chance.lognormvariate(-(costs.sigma**2) / 2, costs.sigma) for _ in range(_N_NOISE)]
        self._n_noise = 0
        self._state = np.broadcast_to(np.zeros(1, np.uint8), (1 << 40,))
        self.worker: SimWorker | None = None
        self.says: Iterable[int] = ()  # the answer to the next request
        self._empty()

    # --- time --------------------------------------------------------------------------------------------------

    def noise(self) -> float:
        """By how much something takes longer, or less, than it should."""
        self._n_noise = (self._n_noise + 1) % _N_NOISE
        return self._noise[self._n_noise]

    def spend_copy(self, n_tokens: int, token_s: float) -> None:
        """So many tokens' state is copied."""
        self.clock.spend(self.costs.copy_s + token_s * n_tokens, Account.COPIES)

    def decode(self, n_rows: int, should_abort: Callable[[], bool] | None = None) -> None:
        costs, clock, worker = self.costs, self.clock, self.worker
        n_streams, tokens, prompts = self.place(self.batch, n_rows)
        factor = self.noise()
        if worker is not None and worker.is_busy:
            clock.spend(worker.interrupt(self._chance.random()), Account.DECODE)
        decode_s = factor * costs.streams.step_s(n_streams, tokens) if n_streams else 0.0
        if not prompts:
            clock.spend(decode_s, Account.DECODE)
        elif self.batch.wants_logits[:n_rows].all():
            clock.spend(factor * self._drafts_s(n_rows), Account.DECODE)
        elif self.mixes_rows:  # one pass, which reads the weights once
            n_prompt = sum(n for n, _ in prompts)
            depth = sum(n * pos for n, pos in prompts) / n_prompt
            attending_s = decode_s - factor * costs.streams.step_s(n_streams, 0) if n_streams else 0.0
            mixed_s = factor * costs.beside.batch_s(n_prompt + n_streams, depth) + attending_s
            clock.spend(decode_s, Account.DECODE)
            clock.spend(max(0.0, mixed_s - decode_s), Account.PROMPTS)
        else:
            clock.spend(decode_s, Account.DECODE)
            # The weights are read once, and attention is each prompt's own.
            prompts_s = sum(costs.beside.batch_s(n, pos) for n, pos in prompts)
            clock.spend(factor * (prompts_s - (len(prompts) - 1) * costs.beside.fixed_s), Account.PROMPTS)
        if worker is not None and worker.is_busy:
            worker.interrupted()

    def _drafts_s(self, n_rows: int) -> float:
        """Streams some of which have drafts. With cells of their own only equal numbers of rows are computed together,
        and then what is left of neighbours."""
        runs = _runs(self.batch.seq[:n_rows].tolist(), self.batch.pos[:n_rows].tolist())
        depth = sum(n * (pos + (n + 1) / 2) for _, pos, n in runs) / n_rows
        if not self.is_split or self._is_in_pool:
            return self.costs.pass_s(len(runs), n_rows, depth)
        n_least = min(n for _, _, n in runs)
        seconds = self.costs.pass_s(len(runs), n_least * len(runs), depth)
        n_streams = n_left = 0
        for at, (seq, _, n) in enumerate(runs):
            if n > n_least:
                n_streams, n_left = n_streams + 1, n_left + n - n_least
            is_end = at + 1 == len(runs) or runs[at + 1][2] == n_least or runs[at + 1][0] != seq + 1
            if is_end and n_left:
                seconds += self.costs.pass_s(n_streams, n_left, depth)
                n_streams = n_left = 0
        return seconds

    def place(self, batch: Batch, n_rows: int) -> tuple[int, float, list[tuple[int, int]]]:
        """Rows are computed: streams, the tokens of their contexts, and of each prompt its rows and how deep they
        begin. Raises DecodeFailed where a row is not the next one of its sequence."""
        lengths, first = self._lengths, batch.first_seq
        seqs, positions = batch.seq[:n_rows].tolist(), batch.pos[:n_rows].tolist()
        if len(set(seqs)) == n_rows:
            for seq, pos in zip(seqs, positions, strict=True):
                if lengths[first + seq] != pos:
                    raise DecodeFailed(f"position {pos} of sequence {first + seq} is not the next one", is_fatal=False)
                lengths[first + seq] = pos + 1
            return n_rows, float(sum(positions) + n_rows), []
        n_streams = tokens = 0
        prompts: list[tuple[int, int]] = []
        for seq, pos, n in _runs(seqs, positions):
            if lengths[first + seq] != pos:
                raise DecodeFailed(f"position {pos} of sequence {first + seq} is not the next one", is_fatal=False)
            lengths[first + seq] = pos + n
            if n == 1:
                n_streams, tokens = n_streams + 1, tokens + pos + 1
            else:
                prompts.append((n, pos))
        return n_streams, float(tokens), prompts

    def tile_waste(self, n_rows: int) -> float:
        return tile_waste(n_rows, self.layout.n_heads, self.n_threads)

    # --- sequences ---------------------------------------------------------------------------------------------

    @property
    def batch(self) -> Batch:
        return self.worker.batch if self._is_in_pool and self.worker is not None else self._batch

    @property
    def pool_spare(self) -> int:
        return len(self._lengths) - 1

    def length(self, seq: int) -> int:
        return self._lengths[seq]

    def state_of(self, n_tokens: int) -> State:
        """As long as the state of so many tokens."""
        return self._state[: n_tokens * self.state_token_bytes]

    def turn_to(self, *, pool: bool) -> None:
        self._is_in_pool = pool

    def seq_share(self, source: int, target: int, start: int, end: int) -> None:
        self._lengths[target] = max(self._lengths[target], end)

    def seq_remove(self, seq: int, start: int, end: int = -1) -> bool:
        length = self._lengths[seq]
        if self.memory_kind is not MemoryKind.ATTENTION and 0 < start < length:
            return False
        if end < 0:
            self._lengths[seq] = min(length, start)
        return True  # of a part in the middle others' cells take the place at once

    def seq_copy(self, source: int, target: int) -> bool:
        self._lengths[target] = self._lengths[source]
        self.spend_copy(self._lengths[source], self.costs.copy_token_s)
        return True

    def state_get(self, seq: int, *, limit_bytes: int) -> bytearray | None:
        """With its number of tokens at the beginning; the rest is memory that nobody touches."""
        n_tokens = self._lengths[seq]
        size = self.layout.state_bytes + n_tokens * self.state_token_bytes
        if size > limit_bytes:
            return None
        self.spend_copy(n_tokens, self.costs.save_token_s)
        state = bytearray(max(8, size))
        state[:8] = n_tokens.to_bytes(8, "little")
        return state

    def state_set(self, seq: int, state: State) -> bool:
        if isinstance(state, bytearray):
            self._lengths[seq] = int.from_bytes(state[:8], "little")
        else:
            self._lengths[seq] = self._n_joined
        self.spend_copy(self._lengths[seq], self.costs.restore_token_s)
        return True

    def state_slices(self, seq: int, ranges: list[tuple[int, int]]) -> Iterator[State]:
        for start, end in ranges:
            self.spend_copy(end - start, self.costs.save_token_s)
            yield self.state_of(end - start)

    def state_join(self, seq: int, pieces: list[tuple[State, int, int, int]]) -> State:
        self._n_joined = pieces[-1][3]
        return self.state_of(self._n_joined)

    def save(self, seq: int, ranges: list[tuple[int, int]]) -> SimCopy:
        return SimCopy(self, seq, ranges)

    def warm(self, seq: int, n_tokens: int, *, moves: bool = False) -> bool:
        """Memory is touched by a thread until the next look."""
        is_warm = n_tokens <= self._n_warm.get(seq, 0)
        self._n_warm[seq] = max(n_tokens, self._n_warm.get(seq, 0))
        return is_warm

    def rebuild(self) -> None:
        self.clock.spend(self.costs.rebuild_s, Account.COPIES)
        self._empty()

    def _empty(self) -> None:
        n_away = max(self.layout.slots, _BACKGROUND_SEQUENCES) if self.is_split else 0
        self._batch, self._is_in_pool = Batch(self.layout.n_batch), False
        self.worker = SimWorker(self, n_away) if n_away else None
        self._lengths = [0] * (self.n_seqs + (n_away + 1 if n_away else 0))
        self._n_warm: dict[int, int] = {}
        self._n_joined = 0

    # --- what has no length and takes no time ------------------------------------------------------------------

    tell = free_adapter = set_chunks = learn = expect = close = _nothing
    load_adapter = decode_media = tokenize = _refuse

    def use(self, adapters: AdapterSet) -> None:
        assert adapters == BASE, "adapters are not simulated"

    def leave_adapter(self, digest: bytes) -> bool:
        return True

    def piece(self, token: int) -> bytes:
        return b""

    def control_text(self, token: int) -> str:
        return ""

    def sampler(self, sampling: Sampling, *, ignore_eos: bool) -> SimSampler:
        return SimSampler(self.says)

    def is_finite(self, row: int) -> bool:
        return True

    def sample(self, wanted: Sequence[tuple[Sampler, int]]) -> list[int]:
        return [sampler.sample(row) for sampler, row in wanted]

    def logprobs(self, row: int, token: int, n_top: int) -> tuple[float, tuple[TokenLogprob, ...]]:
        return 0.0, ()

    def hold_logprobs(self, row: int) -> Logprobs:
        return lambda token, n_top: (0.0, ())


def _runs(seqs: Sequence[int], positions: Sequence[int]) -> list[tuple[int, int, int]]:
    """The sequences of a batch, whose rows are together, with the first position of each and how many rows it has."""
    found, begin = [], 0
    for at in range(1, len(seqs) + 1):
        if at == len(seqs) or seqs[at] != seqs[begin]:
            found.append((seqs[begin], positions[begin], at - begin))
            begin = at
    return found


class SimDisk:
    """A `DiskTier` of sizes alone: a byte is read in `byte_s` of virtual time, and written in none, by a thread beside
    the steps. What was used longest ago goes first. It neither falls behind nor fails."""

    may_write = True
    is_behind = False
    flush = close = _nothing

    def __init__(self, limit_bytes: int, byte_s: float, clock: VirtualClock) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._byte_s, self._clock = byte_s, clock
        self._entries: OrderedDict[bytes, State] = OrderedDict()
        self.lost: list[bytes] = []

    @property
    def n_entries(self) -> int:
        return len(self._entries)

    def scan(self) -> list[DiskRecord]:
        return []

    def write(self, record: DiskRecord, data: State) -> bool:
        if len(data) > self.limit_bytes or (record.parent_key and record.parent_key not in self._entries):
            return False
        self.remove(record.key)
        self._entries[record.key] = data
        self.size_bytes += len(data)
        while self.size_bytes > self.limit_bytes:
            oldest = next(iter(self._entries))
            self.remove(oldest)
            self.lost.append(oldest)
        return True

    def take_lost(self) -> list[bytes]:
        lost, self.lost = self.lost, []
        return lost

    def read(self, key: bytes) -> bytearray | None:
        data = self._entries.get(key)
        if data is not None:
            self._clock.spend(self._byte_s * len(data), Account.COPIES)
        return cast("bytearray | None", data)  # as long as one, and without its memory

    def touch(self, key: bytes) -> None:
        if key in self._entries:
            self._entries.move_to_end(key)

    def remove(self, key: bytes) -> None:
        data = self._entries.pop(key, None)
        if data is not None:
            self.size_bytes -= len(data)

    def clear(self) -> None:
        self._entries.clear()
        self.size_bytes = 0
