"""What a step says to the daemon: the news of every request, the totals, and the map of the cells.

Owner: the engine's main thread. Time is passed in. Pure: where the map is drawn is the caller's (`Beside`).
Invariant: a request has at most one delta per message, and none after its last.
Does not: decide what happens to a request (`engine.py`), or write pipes (`pipes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import Backend
from localrun.engine.cache.cache import Cache
from localrun.engine.cache.cells import Cells, StreamCells
from localrun.engine.request import DraftTotals, Request, refusal
from localrun.engine.schedule.scheduler import Scheduler, StepPlan
from localrun.errors import LocalrunError
from localrun.wire import Delta, Finish, KvRun, LongStep, MediaCounts, Phase, Started, Step, StepStats

T = TypeVar("T")
# Has something done beside the steps. Returns what to ask for the result, which is None until it is there.
Beside = Callable[[Callable[[], T]], Callable[[], T | None]]


def at_once(work: Callable[[], T]) -> Callable[[], T | None]:
    """A `Beside` without a thread: the work is done at once."""
    result = work()
    return lambda: result


class Report:
    """What the next message says, and the totals. See the module."""

    def __init__(self, backend: Backend, beside: Beside[list[KvRun]] | None, times: StepTimes) -> None:
        self.totals = Totals()
        self._times = times
        self._deltas: dict[int, Delta] = {}
        self._started: list[Started] = []
        self._map = KvMap(backend, beside) if beside is not None else None
        self._holdings_sent = (0, 0)

    @property
    def has_deltas(self) -> bool:
        """Whether somebody has something to hear about a request."""
        return bool(self._deltas)

    def delta(self, request: Request) -> Delta:
        """The request's entry, with its counters brought up to date."""
        delta = self._deltas.get(request.id)
        if delta is None:
            delta = Delta(request.id, request.phase, request.n_computed, request.n_output, "", [])
            self._deltas[request.id] = delta
        else:
            delta.phase, delta.n_computed, delta.n_output = request.phase, request.n_computed, request.n_output
        if request.drafts is not None:
            delta.n_drafted, delta.n_accepted = request.drafts.n_drafted, request.drafts.n_accepted
        return delta

    def submitted(self, request: Request) -> None:
        """A request was taken. One that another engine had begun was counted there."""
        if not request.was_started:
            self.totals.prompt_tokens += request.n_known

    def refused(self, request_id: int, error: LocalrunError | None, *, n_prompt: int) -> None:
        """A request never starts: its only delta says why; without an error, that it was cancelled."""
        self._deltas[request_id] = refusal(request_id, error, n_prompt=n_prompt)

    def started(self, request: Request, *, is_first: bool) -> None:
        """A request got a slot, for the first time or again."""
        assert request.slot is not None
        assert request.started_at_s is not None
        self._started.append(
            Started(request.id, request.slot, request.n_whole_prompt, request.n_cached, request.started_at_s)
        )
        if is_first:
            self.totals.cached_tokens += request.n_cached

    def preempted(self, request: Request) -> None:
        """A request lost its slot."""
        self.delta(request)
        self.totals.preemptions += 1

    def ended(self, request: Request, finish: Finish, now_s: float, error: LocalrunError | None) -> None:
        """A request is over: its last delta."""
        delta = self.delta(request)
        delta.text += request.text.finish()
        delta.phase, delta.finish, delta.usage = Phase.DONE, finish, request.usage(now_s)
        delta.stop_text = request.text.stopped
        if error is not None:
            delta.error_code, delta.error_message = error.code, error.message

    def begin_step(self, cells: Cells, running: Sequence[Request], now_s: float) -> None:
        """A step is about to be computed: time to draw a map beside it, if one is due."""
        # Who starts has no cells yet, and would only be seen in the map after this one.
        if self._map is not None and not self._started:
            self._map.begin(cells, running, now_s)

    def computed(self, plan: StepPlan, step_s: float) -> None:
        """A step was computed, which took so long."""
        totals = self.totals
        totals.steps += 1
        totals.step_s = step_s
        totals.note_rows(n_prefill=plan.n_prefill_rows, n_decode=plan.n_decode_rows)
        totals.n_draft_rows += plan.n_draft_rows

    def take(self, cache: Cache, scheduler: Scheduler, media: MediaCounts, now_s: float) -> Step | None:
        """All news since the last call as one message, whose step is then over for the totals; None without news."""
        totals = self.totals
        queue = scheduler.queue_update(now_s)
        n_rows = totals.n_prefill_rows + totals.n_decode_rows
        holdings = (cache.cells.n_used, cache.n_cached_sequences)
        self._times.lap("report")
        self._times.end(totals, len(scheduler.running))
        if not (self._deltas or self._started or n_rows or queue is not None or holdings != self._holdings_sent):
            return None
        step = Step(
            sent_at_s=now_s,
            deltas=list(self._deltas.values()),
            stats=totals.stats(cache, scheduler, media),
            started=self._started,
            queue=queue.ids if queue is not None else None,
            waits_s=queue.waits_s if queue is not None else None,
            kv_map=None if self._map is None else self._map.take(cache.cells, is_running=bool(scheduler.running)),
            long_step=self._times.take(),
        )
        totals.end_step()
        self._deltas, self._started, self._holdings_sent = {}, [], holdings
        return step


@dataclass
class Totals:
    """Counters of an engine since the start, and the statistics that go with every step.

    `step_s`, `n_prefill_rows` and `n_decode_rows` are of the current step. Rows that the background computed since the
    step before count to it.
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
    n_draft_rows: int = 0
    background_s: float = 0.0
    drafts: DraftTotals = field(default_factory=DraftTotals)

    def note_rows(self, *, n_prefill: int, n_decode: int) -> None:
        """Rows were computed."""
        self.prefill_tokens += n_prefill
        self.decode_tokens += n_decode
        self.n_prefill_rows += n_prefill
        self.n_decode_rows += n_decode

    def note_background(self, n_rows: int, seconds: float) -> None:
        """The background computed a batch."""
        self.background_s += seconds
        self.note_rows(n_prefill=n_rows, n_decode=0)

    def end_step(self) -> None:
        """The step was reported."""
        self.n_prefill_rows = self.n_decode_rows = self.n_draft_rows = 0
        self.background_s = 0.0

    def stats(self, cache: Cache, scheduler: Scheduler, media: MediaCounts) -> StepStats:
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
            n_draft_rows=self.n_draft_rows,
            drafts=self.drafts.by_source(),
            media=media,
            background_s=self.background_s,
        )


# A request that comes while an idle engine works notices a delay of this length.
NOTICED_S = 0.1


class StepTimes:
    """What the main thread's time goes into, from the first message that it takes after a step until the next one's
    news: what a stream waits between two tokens. The longest of each minute is reported, with its parts. When nobody
    runs and nothing was computed, nobody waited, so only what the next request might notice (`NOTICED_S`) counts.

    The parts, by whoever calls `lap`: messages, collect (what became ready beside the steps), admit, restore and save
    (prefixes, from memory and to it), move (streams and prefixes, to other cells), background (its next batch, or an
    encoding, begins), plan, drafts, decode (with the wait for the processors), tokens (drawing, grammars, ends),
    report. Parts of the same name add up. A step that took much longer than its thread computed waited: for a device,
    for those who compute beside it, or for a processor that another program had.
    """

    def __init__(self, clock: Callable[[], float], cpu_clock: Callable[[], float]) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._has_begun = False
        self._began_s = self._lap_s = self._cpu_s = 0.0
        self._parts: dict[str, float] = {}
        self._minute, self._longest_s = 0, 0.0
        self._longest: LongStep | None = None

    def begin(self) -> None:
        """The thread has something to do, which counts to the next step."""
        if not self._has_begun:
            self._has_begun = True
            self._began_s = self._lap_s = self._clock()
            self._cpu_s = self._cpu_clock()

    def lap(self, part: str) -> None:
        """The time since the last lap counts to this part."""
        now_s = self._clock()
        self._parts[part] = self._parts.get(part, 0.0) + now_s - self._lap_s
        self._lap_s = now_s

    def end(self, totals: Totals, n_running: int) -> None:
        """The step is over, with the last lap."""
        seconds, minute = self._lap_s - self._began_s, int(self._lap_s // 60)
        if minute != self._minute:
            self._minute, self._longest_s = minute, 0.0
        rows = totals.n_prefill_rows, totals.n_decode_rows, totals.n_draft_rows
        if seconds > self._longest_s and (n_running or any(rows) or seconds >= NOTICED_S):
            self._longest_s = seconds
            cpu_s = self._cpu_clock() - self._cpu_s
            self._longest = LongStep(seconds, cpu_s, *rows, n_running, self._parts)
        self._has_begun, self._parts = False, {}

    def take(self) -> LongStep | None:
        """The longest of this minute, unless it was taken."""
        longest, self._longest = self._longest, None
        return longest


# As often as a map is worth making while requests run.
INTERVAL_S = 0.25
MAX_RUNS = 512  # a power of two, for parts are put together by twos
# No request's: a prefix that is kept for later.
KEPT = 0


class KvMap:
    """Has a map drawn now and then: from a copy of the books, beside a step, for the first message after it is done.

    Where nobody runs it is drawn for every message, at once: so the last one is always right.
    """

    def __init__(self, backend: Backend, beside: Beside[list[KvRun]]) -> None:
        self._backend = backend
        self._beside = beside
        self._drawing: Callable[[], list[KvRun] | None] | None = None
        self._due_s = 0.0

    def begin(self, cells: Cells, running: Sequence[Request], now_s: float) -> None:
        """Begin to draw, unless a map was begun a moment ago."""
        if now_s < self._due_s or self._drawing is not None:
            return
        self._due_s = now_s + INTERVAL_S
        owners = {request.seq: request.id for request in running if request.seq is not None}
        self._drawing = self._beside(partial(kv_map, MapBooks.of(cells, self._n_seqs), owners))

    def take(self, cells: Cells, *, is_running: bool) -> list[KvRun] | None:
        """The map, if there is one that was not taken."""
        if not is_running:
            self._drawing = None
            return kv_map(MapBooks.of(cells, self._n_seqs), {})
        runs = self._drawing() if self._drawing is not None else None
        if runs is not None:
            self._drawing = None
        return runs

    @property
    def _n_seqs(self) -> int:
        worker = self._backend.worker
        return self._backend.n_seqs + (worker.n_seqs if worker else 0)


class MapBooks(NamedTuple):
    """A copy of what a map is drawn from: the lengths of the streams, if there are any, and how many cells each has;
    the cells of the sequences in the pool, and how many of these hold each cell up to its span."""

    lengths: list[int]
    n_stream_cells: int
    cells: list[NDArray[np.int32]]
    refs: NDArray[np.int32]

    @classmethod
    def of(cls, cells: Cells, n_seqs: int) -> MapBooks:
        lengths = [cells.length(seq) for seq in range(cells.n_seqs)] if isinstance(cells, StreamCells) else []
        pool = cells.pool if isinstance(cells, StreamCells) else cells
        in_pool = [pool.cells_of(seq).copy() for seq in range(n_seqs - len(lengths))]
        return cls(lengths, cells.n_cells, in_pool, pool.refs[: pool.span].copy())


def kv_map(books: MapBooks, owners: Mapping[int, int]) -> list[KvRun]:
    """Who holds which KV cells, as runs of used cells in order: for people, who see a map of them.

    In a pool a cell may belong to several sequences, so runs are cut where the holder or the sharing changes. The one
    beside streams lies behind them. Streams that decode together alternate cell by cell: a map of more than `MAX_RUNS`
    runs is drawn coarser, in parts inside of which everybody's cells are put together. How many cells a request has
    stays exact, and where they lie is right but for a part.

    `owners` names the request of each running sequence; of those that share cells, the one with the highest sequence
    number is named."""
    n_streams, n_cells = len(books.lengths), books.n_stream_cells
    runs = [
        KvRun(seq * n_cells, length, owners.get(seq, KEPT), False) for seq, length in enumerate(books.lengths) if length
    ]
    requests = [KEPT, *owners.values()]
    kinds = {seq - n_streams: 1 + 2 * index for index, seq in enumerate(owners, 1)}
    # Of each cell: 0 where it is empty, else 1 + 2 * (index into `requests`), and 1 more where it is shared. Filled up
    # to as many whole rows as a map may have runs.
    span = books.refs.size
    kind_of = np.zeros(MAX_RUNS * -(-span // MAX_RUNS), np.int32)
    for seq in sorted(range(len(books.cells)), key=lambda seq: (seq in kinds, seq)):
        kind_of[books.cells[seq]] = kinds.get(seq, 1)
    kind_of[:span] += books.refs > 1
    is_other = kind_of[1:] != kind_of[:-1]
    if np.count_nonzero(is_other) < MAX_RUNS:
        starts = np.concatenate(([0], np.flatnonzero(is_other) + 1))[: kind_of.size]
        sizes, found = np.diff(starts, append=kind_of.size), kind_of[starts].astype(np.int64)
    else:
        starts, sizes, found = _coarse(kind_of.reshape(MAX_RUNS, -1), 1 + 2 * len(requests))
    return runs + [
        KvRun(n_streams * n_cells + start, size, requests[(kind - 1) // 2], kind % 2 == 0)
        for start, size, kind in zip(starts.tolist(), sizes.tolist(), found.tolist(), strict=True)
        if kind
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
