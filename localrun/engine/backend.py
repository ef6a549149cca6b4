"""What the engine needs from the thing that computes: `llama.LlamaBackend`, or a fake in tests.

A backend owns one context with one pool of KV cells. Sequences are small integers; a cell belongs to one or more
sequences and stands at one position. All calls come from the engine's main thread, except `tokenize`, which only reads
the vocabulary and may run beside a step.

Invariant: a backend checks every integer before native code sees it and raises ValueError for one out of range.
Does not: know about requests, prompts or text beyond single tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localrun.engine.sample.constraint import Constraint
from localrun.errors import BadRequest
from localrun.wire import Adapter, Media, MediaKind, Sampling, Segment, TokenLogprob


class MemoryKind(StrEnum):
    """What a model remembers of a sequence, and so what can be done with it.

    ATTENTION keeps every position: a beginning can be shared, a tail taken off. The others are whole or nothing: WINDOW
    forgets all but the last positions in some layers, RECURRENT has one state that every token changes, HYBRID has
    such states besides attention. Their `seq_share` is an error and their `seq_remove` refuses all but the whole, and
    the last rows of a decode (`Backend.n_rollback`).
    """

    ATTENTION = "attention"
    WINDOW = "window"
    RECURRENT = "recurrent"
    HYBRID = "hybrid"


# Of a context: LLAMA_MAX_SEQ in llama.cpp.
MAX_SEQUENCES = 256
HASH_BYTES = 16
_LARGEST_SCALE = 3e38


class AdapterSet(NamedTuple):
    """The adapters of a request, in order of their digests, and none without an effect. What is computed with one set
    means nothing to another: `hash` names the set, empty for none, and is a part of `PrefixKey.salt`."""

    adapters: tuple[Adapter, ...] = ()
    hash: bytes = b""

    @classmethod
    def of(cls, adapters: Iterable[Adapter]) -> AdapterSet:
        """The set of these. One that is named twice is in effect with the sum of its strengths. Raises BadRequest for
        a strength that no float32 can say."""
        paths: dict[bytes, str] = {}
        scales: dict[bytes, float] = {}
        for path, digest, scale in ((adapter.path, adapter.digest, adapter.scale) for adapter in adapters):
            paths[digest], scales[digest] = path, scales.get(digest, 0.0) + scale
        hashed = hashlib.blake2b(digest_size=HASH_BYTES, person=b"localrun adapter")
        chosen = []
        for digest in sorted(scales):
            scale = float(np.float32(scales[digest])) if abs(scales[digest]) < _LARGEST_SCALE else np.nan
            if not np.isfinite(scale):
                raise BadRequest(f"the strength of the adapter {paths[digest]} is no number", field="adapters")
            if scale:
                chosen.append(Adapter(paths[digest], digest, scale))
                hashed.update(struct.pack("<Bf", len(digest), scale) + digest)
        return cls(tuple(chosen), hashed.digest() if chosen else b"")


BASE = AdapterSet()

# A hybrid model can keep its states before each of so many rows: a step can verify so many drafts of a sequence.
SNAPSHOTS = 3


def first_undoable(counts: Sequence[int], n_rollback: int) -> int:
    """From which sequence on the rows of a decode of HYBRID can be taken off again, given its rows of each sequence, in
    order. llama.cpp computes at once only neighbours that have as many, fewest first; in a later pass of several
    sequences the states of earlier ones may change places, without the snapshots of what they were."""
    if len(set(counts)) == 1:
        return 0
    if max(counts) > 1 + n_rollback:
        return len(counts)  # in passes of their parts
    first = begin = 0
    while begin < len(counts):
        n_least = min(counts[begin:])
        end = begin + 1
        while end < len(counts) and counts[begin] == counts[end] == n_least:
            end += 1
        if end - begin > 1:
            first = begin
        begin = end
    return first


State = bytes | bytearray | NDArray[np.uint8]


class NoRoom(Exception):
    """No free cells for this batch. The pool is as it was before the call."""


class DecodeFailed(Exception):
    """The step failed. `is_fatal` False means that the batch itself was refused, so trying again is pointless."""

    def __init__(self, message: str, *, is_fatal: bool) -> None:
        super().__init__(message)
        self.is_fatal = is_fatal


class StepAborted(Exception):
    """The step was aborted because `should_abort` returned True. The pool is as it was before the call, or as
    `DecodeFailed` leaves it."""


def never_abort() -> bool:
    """The default for `should_abort`."""
    return False


class Batch:
    """The rows of one step, one token each, as parallel arrays; a decode reads the first `n_rows`.

    `token`, `pos` and `seq` are i32[capacity]; `wants_logits` is i8[capacity], nonzero where the row's logits are
    needed. All rows are to be computed with the set of adapters that `adapter_hash` names. `seq` counts from
    `first_seq` on.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.token: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.pos: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.seq: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.wants_logits: NDArray[np.int8] = np.zeros(capacity, np.int8)
        self.adapter_hash = b""
        self.first_seq = 0


class Sampler(Protocol):
    """One request's sampler chain, with its window of recent tokens. What it draws for a token depends on the seed and
    on the position of the token: how many were accepted or sampled before.

    `is_greedy`: it is nothing but an argmax. `mu` is what Mirostat has learned, None without it.
    """

    is_greedy: bool

    @property
    def mu(self) -> float | None: ...

    def constrain(self, constraint: Constraint) -> None:
        """From now on choose only what it allows; `sample` returns `DEAD_END` where that is nothing."""

    def accept(self, tokens: list[int], mu: float | None = None) -> None:
        """Show tokens that were not sampled here: the prompt, or what was sampled on another engine, where `mu` was
        this at last."""

    def sample(self, row: int) -> int:
        """The next token from the logits of `row` of the last decode; the chain remembers it. `DEAD_END` if they are no
        numbers, which weights and adapters can compute (NaN)."""

    def hold(self, row: int) -> Callable[[], int]:
        """What `sample` does with this row, for later and for another thread; only for a constrained one."""

    def close(self) -> None:
        """Free native memory. The sampler is unusable after it; closing twice is allowed."""


# Of (token, n_top): as `Backend.logprobs` of one row.
Logprobs = Callable[[int, int], tuple[float, tuple[TokenLogprob, ...]]]


class Copy(Protocol):
    """The saved state of a sequence on its way into memory. The main thread does what is native (`advance`), another
    one the rest: cutting, and touching fresh memory, which takes ten times as long as copying.

    `has_left`: the sequence is not needed any more; until then it must stay as it is. `states` are there at the end.
    """

    has_left: bool
    states: list[State]

    def advance(self) -> bool:
        """Do what is native, if it is time; never wait. True once all is done."""

    def wait(self, timeout_s: float) -> None:
        """Until `advance` has something to do, or at most so long."""


class MediaChunk(NamedTuple):
    """A part of a picture or a recording, as the model gets it: `n_tokens` rows of numbers instead of tokens, at
    `n_pos` positions. It is number `ordinal` of its `media`; large pictures and long recordings have several.

    Unless it `is_causal` its rows attend to each other, so that all of them are computed in one call. Rows are cells
    and count as tokens everywhere; only the backend knows positions (`Backend.set_chunks`).
    """

    n_tokens: int
    n_pos: int
    is_causal: bool
    media: Media
    ordinal: int


class MediaRows(NamedTuple):
    """What a call computes of a chunk that begins at index `start` of a sequence: `n_rows` of its `rows`, from number
    `first` on. `rows` is f32[chunk.n_tokens, n_embd_input]."""

    seq: int
    start: int
    chunk: MediaChunk
    rows: NDArray[np.float32]
    first: int
    n_rows: int


class Encoding(Protocol):
    """The rows of a chunk, on their way. Whoever began it asks for the `result`, or gives it up with `halt`.

    `is_over`: `result` need not wait, and the next one may begin.
    """

    @property
    def is_over(self) -> bool: ...

    def result(self) -> NDArray[np.float32]:
        """The rows, f32[n_tokens, n_embd_input]. Raises DecodeFailed, and BadRequest for media that the
        projector cannot take."""

    def halt(self) -> None:
        """Cancel. `is_over` becomes true shortly after; there is no result."""


class Projector(Protocol):
    """What makes rows of media. It takes these `kinds`, sound at `audio_rate_hz` samples a second (0: none).

    `fingerprint` stands for everything but the media that rows depend on. `max_chunk_tokens` is the most rows that must
    be computed in one call; 0 if any chunk may be cut. The batch of the context that computes prompts has room for it.
    """

    kinds: tuple[MediaKind, ...]
    audio_rate_hz: int
    fingerprint: bytes
    max_chunk_tokens: int

    def tokenize(self, segments: Sequence[Segment]) -> list[list[int] | MediaChunk]:
        """A prompt: token ids, and chunks where the media are, with what the model wants around these. No BOS is added.
        In any thread. Only the size of the media counts, and no file is read. Raises BadRequest for media that it
        cannot take."""

    def begin(self, chunk: MediaChunk) -> Encoding:
        """Make the rows of a chunk, in a thread of its own that pauses while streams are decoded; one chunk at a time.
        Raises ValueError if there is another, or if the file is not as large as it should be."""


class Worker(Protocol):
    """Computes one batch at a time beside everything else. `computed_s` is how long the last one took, without pauses.

    While it `is_busy`, its sequences belong to it. They are numbered from `first_seq` on.
    """

    batch: Batch
    first_seq: int
    n_seqs: int

    @property
    def is_busy(self) -> bool: ...

    @property
    def computed_s(self) -> float: ...

    def use(self, adapters: AdapterSet) -> None:
        """What is started from now on is computed with these adapters; never while it `is_busy`."""

    def start(self, n_rows: int) -> None:
        """Begin to compute the first rows of `batch`. Raises ValueError, and nothing has begun, for a number out of
        range, or rows for other adapters."""

    def start_media(self, part: MediaRows) -> None:
        """Begin to compute rows of a chunk (`Backend.decode_media`), with the logits of the last one, instead of a
        batch."""

    def is_over(self) -> bool:
        """Whether what was started is over."""

    def finish(self) -> None:
        """End what was started, once it is over. Raises NoRoom or DecodeFailed."""

    def is_finite(self, row: int) -> bool:
        """As `Backend.is_finite`, of a row that wanted logits, after `finish`."""

    def halt(self) -> None:
        """Give up what was started, soon. What was computed of it may be there or not."""


class Backend(Protocol):
    """See the module. `n_ctx` is the most tokens one sequence may have, `eog_tokens` those that end a generation.
    `message_ends` are these, and what else ends a message of a prompt.

    `cuts_states`: whether `state_slices` works; a position takes `state_token_bytes` of a slice, or more.

    `is_split`: whether every sequence below `n_seqs` has a stream of `n_cells` / `n_seqs` cells of its own. Then there
    is a `worker`, else None: it computes long prompts beside the steps, in sequences numbered from `n_seqs` on, which
    share a pool of `n_cells`; one more, `pool_spare`, is for copies. Nothing may touch these while it is busy, and a
    `decode` makes it pause. `turn_to` says whether steps are computed in the streams or in the pool, and so whose
    `batch` it is. `rebuild` replaces the worker.

    `mixes_rows`: whether the rows of prompts and of streams are best computed in one call. `overlaps`: whether
    `decode` computes without the caller's thread, and calls `on_compute` in that thread while it does.

    `state_salt` is what else the states of this context depend on, a part of `PrefixKey.salt`: some models embed
    positions in one of two ways, by how long a sequence may get in the layout.

    `n_rollback`: `seq_remove` can take the last so many rows of a decode off their sequence again, but not its first
    row there; once, and before anything else is decoded. 0 where it cannot, and nothing is drafted. Of HYBRID it can if
    all sequences had as many rows, or those with more came later (`first_undoable`). A decode may have `n_draft_rows`
    of drafts, with logits. `heads` drafts with the model's own layers for that, None without.

    `projector` is None for a model that takes only text. A chunk whose positions are not as many as its rows is whole
    or nothing in cells, too: `seq_remove` at an index inside of it refuses.
    """

    name: str
    memory_kind: MemoryKind
    cuts_states: bool
    is_split: bool
    mixes_rows: bool
    overlaps: bool
    on_compute: Callable[[], None]
    n_cells: int
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_seqs: int
    n_threads: int
    n_gpu_layers: int
    model_size_bytes: int
    eog_tokens: frozenset[int]
    message_ends: frozenset[int]
    control_tokens: tuple[str, ...]
    bos_token: int | None
    state_salt: bytes
    n_rollback: int
    n_draft_rows: int

    @property
    def batch(self) -> Batch: ...

    @property
    def worker(self) -> Worker | None: ...

    @property
    def pool_spare(self) -> int: ...

    @property
    def projector(self) -> Projector | None: ...

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of `text`; with `parse_special` the text of a control token becomes that token. No BOS is added."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; empty for control tokens. Raises ValueError outside the vocabulary."""

    def control_text(self, token: int) -> str:
        """The name of a control token; empty for others."""

    def decode(self, n_rows: int, should_abort: Callable[[], bool] | None = None) -> None:
        """Compute the first `n_rows` of `batch`. Raises NoRoom or DecodeFailed, and ValueError if the rows are for
        other adapters than those in use. Once `should_abort` returns True it may raise StepAborted, where that is
        possible: on a CPU, and of models without states."""

    def tell(self, ring: Callable[[], None]) -> None:
        """From now on `ring`, in any thread, when the worker's batch or an encoding is over."""

    def turn_to(self, *, pool: bool) -> None:
        """The steps from now on are computed in the pool, which must not be busy, or else in the streams. Logits are
        those of the last decode there. Raises ValueError where there is no pool."""

    def use(self, adapters: AdapterSet) -> None:
        """What is decoded from now on is computed with these adapters. A change has the next decode build its graph
        anew. Raises ValueError for one that is not loaded."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter, unless it is loaded. Any thread, but one call of this or `free_adapter` at a time. Raises
        BadModelFile if it is none for this model."""

    def leave_adapter(self, digest: bytes) -> bool:
        """Use it no more, for somebody wants to free it. False while the background computes with it."""

    def free_adapter(self, digest: bytes) -> None:
        """Free a loaded adapter that nobody uses. Any thread, as for `load_adapter`."""

    def set_chunks(self, seq: int, chunks: tuple[tuple[int, MediaChunk], ...]) -> None:
        """The chunks of the request that this sequence is used for, each with the index of its first row, in order; ()
        for text. To be told before anything else is done with the sequence, also where it is the target of a copy.
        Equal tokens have equal tables, so what the sequence already holds of the request stays where it is."""

    def decode_media(self, part: MediaRows) -> None:
        """Compute rows of a chunk, with the logits of the last one, row `n_rows - 1` of this decode. The caller has set
        `batch.adapter_hash`. Raises NoRoom or DecodeFailed, and ValueError as `decode`, and for a part of a chunk that
        is not causal, or a sequence that is elsewhere (`turn_to`)."""

    def sampler(self, sampling: Sampling, *, ignore_eos: bool) -> Sampler:
        """A new chain. With `ignore_eos` no end-of-generation token is ever chosen."""

    def learn(self, sampling: Sampling) -> None:
        """Do ahead what would take `sampler` long. Any thread."""

    def expect(self, seq: int, sampler: Sampler, *, wants_logprobs: bool) -> None:
        """A request begins in this sequence: `sampler` chooses its tokens, and perhaps `logprobs` is asked about them.
        Logits that will not be read are not copied from the GPU."""

    def tile_waste(self, n_rows: int) -> float:
        """How many times as much attention as they need is computed for so many rows of a prompt (`budget.py`)."""

    def is_finite(self, row: int) -> bool:
        """Whether the logits of this row of the last decode are numbers. Weights and adapters may compute others (NaN,
        infinity), and then all later rows of the sequence have none either. Such cells can spoil those of others, also
        after their sequence was removed: `rebuild` makes new ones."""

    def sample(self, wanted: Sequence[tuple[Sampler, int]]) -> list[int]:
        """The next token of each (sampler, row of the last decode)."""

    def logprobs(self, row: int, token: int, n_top: int) -> tuple[float, tuple[TokenLogprob, ...]]:
        """Natural log-probability of `token` under the logits of `row`, and of the `n_top` best tokens, best first."""

    def hold_logprobs(self, row: int) -> Logprobs:
        """`logprobs` of this row as it is now, for later and for another thread."""

    def seq_share(self, source: int, target: int, start: int, end: int) -> None:
        """Let `target` share the cells of `source` at positions [start, end): both are in one pool."""

    def seq_remove(self, seq: int, start: int, end: int = -1) -> bool:
        """Take `seq` off its cells at positions [start, end); -1 is the end. False if the memory kind refuses."""

    def state_get(self, seq: int, *, limit_bytes: int) -> bytearray | None:
        """The saved state of a sequence; None, without the work of making it, if it is larger than `limit_bytes`."""

    @property
    def state_token_bytes(self) -> int: ...

    def state_slices(self, seq: int, ranges: list[tuple[int, int]]) -> Iterator[State]:
        """The saved state of a sequence at each range of positions [start, end), one by one: u8[n_bytes], about
        `state_token_bytes` for each position. To be used up before the next call of anything with states."""

    def save(self, seq: int, ranges: list[tuple[int, int]]) -> Copy:
        """The same, of at least one range and beside the steps."""

    def state_join(self, seq: int, pieces: list[tuple[State, int, int, int]]) -> State:
        """A state for `state_set` of `seq` out of pieces that follow each other: (slice, the position that the slice
        begins with, start, end) stands for positions [start, end) of the slice. It is good until the next call of
        anything with states."""

    def state_set(self, seq: int, state: State) -> bool:
        """Put a saved state into an empty sequence. False, leaving it empty, if it does not fit or is damaged."""

    def seq_copy(self, source: int, target: int) -> bool:
        """Give an empty sequence all that another one holds; only where `cuts_states`. False if it does not fit."""

    def warm(self, seq: int, n_tokens: int, *, moves: bool = False) -> bool:
        """Whether a state of so many tokens can be put into this sequence without a wait for memory that was never
        written to. If not, a thread sees to it. If it `moves`, it is one of the pool's for a stream, or of a stream for
        the pool."""

    def rebuild(self) -> None:
        """Begin anew with other cells; all sequences are empty then, without chunks."""

    def close(self) -> None:
        """Free everything."""
