"""What a step says to the daemon: the news of every request, the totals, and the map of the cells.

Owner: the engine's main thread. Time is passed in. Pure.
Does not: decide what happens to a request (`engine.py`), or write pipes (`pipes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import Backend
from localrun.engine.cache.cache import Cache
from localrun.engine.cache.cells import Cells, PoolCells, StreamCells
from localrun.engine.request import Request, refusal
from localrun.engine.schedule.scheduler import Scheduler
from localrun.errors import LocalrunError
from localrun.wire import Delta, KvRun, Started, Step, StepStats


class News:
    """What the next message to the daemon says: the news of every request since the last one.

    Owner: the engine's main thread. Time is passed in.
    Invariant: a request has at most one delta per message, and none after its last.
    Does not: decide what happens to a request (`engine.py`), or write pipes (`process.py`).
    """

    def __init__(self, backend: Backend) -> None:
        self._deltas: dict[int, Delta] = {}
        self._started: list[Started] = []
        self._kv = KvNews(backend)
        self._holdings_sent = (0, 0)

    @property
    def has_deltas(self) -> bool:
        """Whether somebody has something to hear about a request."""
        return bool(self._deltas)

    def delta(self, request: Request) -> Delta:
        """The request's entry, with its counters brought up to date."""
        delta = self._deltas.get(request.id)
        if delta is None:
            delta = self._deltas[request.id] = Delta(request.id, request.phase, 0, 0, tokens=[])
        delta.phase, delta.n_computed, delta.n_output = request.phase, request.n_computed, request.n_output
        return delta

    def refuse(self, request_id: int, error: LocalrunError | None, *, n_prompt: int) -> None:
        """A request never starts: its only delta says why; without an error, that it was cancelled."""
        self._deltas[request_id] = refusal(request_id, error, n_prompt=n_prompt)

    def start(self, request: Request) -> None:
        """A request got a slot."""
        assert request.slot is not None
        self._started.append(Started(request.id, request.slot, request.n_prompt, request.n_cached))

    def publish(self, cache: Cache, scheduler: Scheduler, totals: Totals, now_s: float) -> Step | None:
        """All news since the last call as one message, whose step is then over for `totals`; None without news."""
        queue = scheduler.queue_news(now_s)
        n_rows = totals.n_prefill_rows + totals.n_decode_rows
        holdings = (cache.cells.n_used, cache.n_cached_sequences)
        is_news = self._deltas or self._started or n_rows or queue is not None or holdings != self._holdings_sent
        if not is_news:
            return None
        step = Step(
            sent_at_s=now_s,
            deltas=list(self._deltas.values()),
            stats=totals.stats(cache, scheduler),
            started=self._started,
            queue=queue.ids if queue is not None else None,
            waits_s=queue.waits_s if queue is not None else None,
            kv_map=self._kv.since(cache.cells, scheduler.running, now_s),
        )
        totals.end_step()
        self._deltas, self._started, self._holdings_sent = {}, [], holdings
        return step


@dataclass
class Totals:
    """Counters of an engine since the start, and the statistics that go with every step.

    `step_s`, `n_prefill_rows` and `n_decode_rows` are of the step at hand, to which rows count that the background
    computed since the step before it.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    step_s: float = 0.0
    n_prefill_rows: int = 0
    n_decode_rows: int = 0

    def note_rows(self, *, n_prefill: int, n_decode: int) -> None:
        """Rows were computed."""
        self.prefill_tokens += n_prefill
        self.decode_tokens += n_decode
        self.n_prefill_rows += n_prefill
        self.n_decode_rows += n_decode

    def note_step(self, *, n_prefill: int, n_decode: int, step_s: float) -> None:
        """A step was computed, which took so long."""
        self.steps += 1
        self.step_s = step_s
        self.note_rows(n_prefill=n_prefill, n_decode=n_decode)

    def end_step(self) -> None:
        """The step was reported."""
        self.n_prefill_rows = self.n_decode_rows = 0

    def stats(self, cache: Cache, scheduler: Scheduler) -> StepStats:
        """What people are told of a step."""
        cells, tiers = cache.cells, cache.tiers
        return StepStats(
            step=self.steps,
            step_s=self.step_s,
            n_prefill_rows=self.n_prefill_rows,
            n_decode_rows=self.n_decode_rows,
            n_running=len(scheduler.running),
            n_queued=len(scheduler.waiting),
            kv_cells_used=cells.n_used,
            kv_cells_shared=cells.n_shared,
            cached_sequences=cache.n_cached_sequences,
            ram_cache_bytes=tiers.size_bytes,
            prefill_tokens_total=self.prefill_tokens,
            decode_tokens_total=self.decode_tokens,
            prompt_tokens_total=self.prompt_tokens,
            cached_tokens_total=self.cached_tokens,
            preemptions_total=self.preemptions,
            ram_entries=tiers.n_ram_entries,
            disk_cache_bytes=tiers.disk_bytes,
            disk_entries=tiers.n_disk_entries,
            ram_restored_tokens_total=tiers.ram_hit_tokens,
            disk_restored_tokens_total=tiers.disk_hit_tokens,
        )


# As often as a map is worth making while requests run.
INTERVAL_S = 0.25
MAX_RUNS = 512  # a power of two, for parts are put together by twos
# No request's: a prefix that is kept for later.
KEPT = 0


class KvNews:
    """Makes a map now and then."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._due_s = 0.0

    def since(self, cells: Cells, running: Sequence[Request], now_s: float) -> list[KvRun] | None:
        """The map, unless one was made a moment ago. The last one always comes: it is made whenever nobody runs."""
        if running and now_s < self._due_s:
            return None
        assert isinstance(cells, PoolCells | StreamCells)
        self._due_s = now_s + INTERVAL_S
        n_away = self._backend.background.n_seqs if self._backend.background else 0
        owners = {request.seq: request.id for request in running if request.seq is not None}
        return kv_map(cells, self._backend.n_seqs + n_away, owners)


def kv_map(cells: PoolCells | StreamCells, n_seqs: int, owners: Mapping[int, int]) -> list[KvRun]:
    """Who holds which KV cells, as runs of used cells in order: for people, who see a map of them.

    In one pool a cell may belong to several sequences, so runs are cut where the holder or the sharing changes. Streams
    that decode together alternate cell by cell: a map of more than `MAX_RUNS` runs is drawn coarser, in parts inside of
    which everybody's cells are put together. How many cells a request has stays exact, and where they lie is right but
    for a part.

    `owners` names the request of each running sequence; of those that share cells, the
    one with the highest sequence number is named."""
    if isinstance(cells, StreamCells):
        return _of_streams(cells, n_seqs, owners)
    requests = [KEPT, *owners.values()]
    kinds = {seq: 1 + 2 * index for index, seq in enumerate(owners, 1)}
    # Of each cell: 0 where it is empty, else 1 + 2 * (index into `requests`), and 1 more where it is shared. Filled up
    # to as many whole rows as a map may have runs.
    kind_of = np.zeros(MAX_RUNS * -(-cells.span // MAX_RUNS), np.int32)
    for seq in sorted(range(n_seqs), key=lambda seq: (seq in owners, seq)):
        kind_of[cells.cells_of(seq)] = kinds.get(seq, 1)
    kind_of[: cells.span] += cells.refs[: cells.span] > 1
    is_other = kind_of[1:] != kind_of[:-1]
    if np.count_nonzero(is_other) < MAX_RUNS:
        starts = np.concatenate(([0], np.flatnonzero(is_other) + 1))[: kind_of.size]
        sizes, found = np.diff(starts, append=kind_of.size), kind_of[starts].astype(np.int64)
    else:
        starts, sizes, found = _coarse(kind_of.reshape(MAX_RUNS, -1), 1 + 2 * len(requests))
    return [
        KvRun(start, size, requests[(kind - 1) // 2], kind % 2 == 0)
        for start, size, kind in zip(starts.tolist(), sizes.tolist(), found.tolist(), strict=True)
        if kind
    ]


def _of_streams(cells: StreamCells, n_seqs: int, owners: Mapping[int, int]) -> list[KvRun]:
    lengths = [cells.length(seq) for seq in range(n_seqs)]
    return [
        KvRun(seq * cells.n_cells, length, owners.get(seq, KEPT), False) for seq, length in enumerate(lengths) if length
    ]


def _coarse(rows: NDArray[np.int32], n_kinds: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Starts, sizes and kinds of at most `MAX_RUNS` runs: in each row of cells, or in two, four ... of them, those of
    one kind lie together, the empty ones last."""
    keys = rows + np.arange(len(rows), dtype=np.int32)[:, np.newaxis] * n_kinds
    counts = np.bincount(keys.ravel(), minlength=len(rows) * n_kinds).reshape(len(rows), n_kinds)
    counts[:, 0] = 0
    while np.count_nonzero(counts) > MAX_RUNS and len(counts) > 1:
        counts = counts[0::2] + counts[1::2]
    begins = np.arange(len(counts))[:, np.newaxis] * (rows.size // len(counts))
    starts = begins + np.cumsum(counts, axis=1) - counts
    at, found = np.nonzero(counts)
    return starts[at, found], counts[at, found], found
