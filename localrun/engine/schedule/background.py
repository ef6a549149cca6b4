"""Long prompts, computed beside the steps: who is computed, whose rows a batch has, and what becomes of it.

Owner: the engine's main thread. The backend's `Worker`, which not every layout has, computes one batch at a time, in
sequences numbered from `first_seq` on, and pauses while streams are decoded. It computes all but the last token of a
prompt; that one's logits are wanted in a step. Requests that are too long for a stream have their steps in the same
context, between two batches, which are short while there are such. Rows of media make a batch of their own, a chunk's
or a part of it, in turn with those of text.

Invariant: while `is_busy`, nobody touches the background's sequences. Who leaves meanwhile leaves its sequence to the
batch, and it comes back with that (`BatchResult.left`).
Does not: compute or pause (`worker.py`), decide when streams have their turn (`scheduler.py`), or move finished prompts
(`engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import DecodeFailed, MediaRows, NoRoom, Worker
from localrun.engine.request import Request
from localrun.engine.sample.text import MediaSpan
from localrun.engine.schedule.budget import TILE_ROWS, CostModel, best_size, deep_size, untried_rows
from localrun.engine.schedule.policy import LOWEST_RANK, Demand, TurnOrder, share_rows
from localrun.engine.schedule.scheduler import Grant, fill_batch, first_of, non_finite_requests

# Copying a long prompt's state to the main context takes about as long.
MOVE_TO_STREAM_S = 0.025
# A batch takes about this long at most, so that a prompt that comes after it waits no longer; and so many latency
# targets, because the longer a batch takes, the longer its single operations, which nobody can interrupt. With a limit
# of 1 s, batches deep in a prompt were so small that they took a fifth more. `deep_size` may take longer.
BATCH_S = 2.0
BATCH_TARGETS = 10
# Where streams wait for the whole of it.
HELD_TARGETS = 2
# Time limit of a batch of the lowest lane alone: a request of a higher lane waits at most this long for the worker.
LOWEST_BATCH_S = 0.5

UNLIMITED = 1 << 30

# The rows of a chunk; None as long as they are not encoded.
RowsOf = Callable[[MediaSpan], NDArray[np.float32] | None]


class DroppedSequence(NamedTuple):
    """What a request left behind: a sequence with `n_before` of its tokens, or `n_after` if the batch is computed, to
    be kept. Both are 0 if nothing of it is."""

    seq: int
    n_before: int
    n_after: int


class BatchResult(NamedTuple):
    """A batch that is over. Unless `is_computed`, nobody knows how much of it was; `error` may say why.

    `grants` are of the requests that are still there; `seqs` has the sequence of each row. If the logits of some
    request are not finite, the batch counts as not computed, and `non_finite` has those requests, if they are still
    there."""

    grants: tuple[Grant, ...]
    left: tuple[DroppedSequence, ...]
    seqs: list[int]
    seconds: float
    is_computed: bool
    error: DecodeFailed | None = None
    non_finite: dict[Request, int] | None = None


class BackgroundPrefill:
    """See the module. `worker` is the layout's, None where it has none. `cost` is learned here, and outlives it."""

    def __init__(self, worker: Callable[[], Worker | None], cost: CostModel) -> None:
        self._worker_now = worker
        self._cost = cost
        self._requests: dict[Request, None] = {}
        self._ring = TurnOrder()
        self._adapter_hash, self._switches = b"", False
        self._grants: tuple[Grant, ...] = ()
        self._begun: tuple[Grant, ...] = ()
        self._left: list[DroppedSequence] = []
        self.seqs: list[int] = []  # of each row of the batch under way
        self._was_media = False
        self._depth = 0.0

    @property
    def _worker(self) -> Worker:
        worker = self._worker_now()
        assert worker is not None
        return worker

    @property
    def is_there(self) -> bool:
        """Whether the layout has a worker."""
        return self._worker_now() is not None

    @property
    def is_busy(self) -> bool:
        """Whether a batch is under way."""
        worker = self._worker_now()
        return worker is not None and worker.is_busy

    @property
    def is_over(self) -> bool:
        """Whether a batch is under way and was computed."""
        return self.is_busy and self._worker.is_over()

    @property
    def completes(self) -> list[Request]:
        """Whose prompts are done with this batch, but for their last tokens: taking one home is a copy."""
        ends = ((request, request.n_computed + n_tokens) for request, n_tokens, _ in self._grants)
        return [request for request, end in ends if end == request.last_start]

    @property
    def is_lowest(self) -> bool:
        """Whether the batch under way is for nobody but requests that run in the lowest lane."""
        return all(grant.request.rank == LOWEST_RANK for grant in self._grants)

    @property
    def has_prompts(self) -> bool:
        """Whether anything is to be computed here."""
        return bool(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def takes(self, n_new: int, n_direct: int) -> bool:
        """Whether a prompt with so many tokens to compute has a place here. Up to `n_direct` are as well computed among
        the streams: for those two copies and a wait would cost more. While a batch `is_busy` it has to wait."""
        return self.is_there and n_new > n_direct and len(self._requests) + len(self._left) < self._worker.n_seqs

    def add(self, request: Request) -> None:
        """It is computed here from now on. Its sequence is one of ours, and holds its first `n_computed` tokens."""
        self._requests[request] = None
        request.skips_steps = True

    @property
    def n_pending(self) -> int:
        """Tokens that are to be computed here."""
        return sum(request.last_start - request.n_computed for request in self._requests)

    def begin(
        self,
        target_s: float | None,
        rows_of: RowsOf = lambda span: None,
        *,
        most_rows: int = UNLIMITED,
        holds_streams: bool = False,
    ) -> bool:
        """Begin the next batch of at most so many rows, unless there is one or nobody needs it. The rows are those that
        streams with this target have patience for, less if some of them wait for all of it; 0 or None: there are none
        in a hurry. They are prompts with the same adapters, and the sets of adapters take turns. Whether one was
        begun."""
        if self.is_busy or not self._requests:
            return False
        batch_group = self._ring.order(dict.fromkeys(request.batch_group for request in self._requests))[0]
        self._ring.took(batch_group)
        mine = [request for request in self._requests if request.batch_group == batch_group]
        prompts = sorted(mine, key=lambda request: request.seq or 0)
        seeing = [request for request in prompts if request.chunks and request.next_chunk is not None]
        if seeing:
            prompts = [request for request in prompts if request not in seeing]
            is_media_due = not (self._was_media and prompts)
            if is_media_due and self._begin_media(seeing, target_s, rows_of, most_rows, holds_streams=holds_streams):
                return True
            if not prompts:
                return False
        depth = sum(request.n_computed for request in prompts) / len(prompts)
        demands = [
            Demand(min(request.last_start - request.n_computed, request.n_grantable), request.client, request.rank)
            for request in prompts
        ]
        is_lowest = all(demand.rank == LOWEST_RANK for demand in demands)
        n_rows = self._n_rows(depth, target_s, holds_streams=holds_streams, is_lowest=is_lowest)
        n_rows = _with_the_rest(n_rows, sum(demand.n_rows for demand in demands), self._worker.batch.capacity)
        given = share_rows(demands, min(n_rows, most_rows))
        grants = [Grant(request, n_rows) for request, n_rows in zip(prompts, given, strict=True) if n_rows]
        if not grants:
            return False
        seqs = fill_batch(self._worker.batch, grants)
        self._worker.use(prompts[0].adapters)
        self._worker.start(len(seqs))
        self._note(grants, seqs)
        self._was_media = False
        return True

    def _begin_media(
        self, seeing: list[Request], target_s: float | None, rows_of: RowsOf, most_rows: int, *, holds_streams: bool
    ) -> bool:
        """Begin a batch for the next chunk of one of these requests, if one of them is encoded."""
        ready = [request for request in seeing if (span := request.next_chunk) and rows_of(span) is not None]
        if not ready:
            return False
        request = first_of(ready)
        span = request.next_chunk
        assert span is not None
        assert request.seq is not None
        rows = rows_of(span)
        assert rows is not None
        n_rows, first = request.n_grantable, request.n_computed - span.start
        if span.chunk.is_causal:
            n_rows = min(n_rows, most_rows, self._n_rows(request.n_computed, target_s, holds_streams=holds_streams))
        if n_rows > most_rows:
            return False
        self._worker.batch.adapter_hash = request.adapters.hash
        self._worker.use(request.adapters)
        self._worker.start_media(MediaRows(request.seq, span.start, span.chunk, rows, first, n_rows))
        self._note([Grant(request, n_rows)], [request.seq] * n_rows)
        self._was_media = True
        return True

    def _note(self, grants: list[Grant], seqs: list[int]) -> None:
        """A batch was begun."""
        self._grants = self._begun = tuple(grants)
        self.seqs = seqs
        adapter_hash = grants[0].request.adapters.hash
        self._switches, self._adapter_hash = adapter_hash != self._adapter_hash, adapter_hash
        self._depth = sum(grant.request.n_computed * grant.n_tokens for grant in grants) / len(seqs)

    def collect(self) -> BatchResult:
        """End the batch that is over."""
        try:
            self._worker.finish()
        except NoRoom as error:
            # Room was made before: as for any failure, try again.
            return self._end(is_computed=False, error=DecodeFailed(f"{error} in the background", is_fatal=True))
        except DecodeFailed as error:
            return self._end(is_computed=False, error=error)
        self._cost.observe(len(self.seqs), self._depth, self._worker.computed_s, switches=self._switches)
        non_finite = non_finite_requests(self._begun, self._worker.is_finite)
        if non_finite:
            here = {grant.request: non_finite[grant.request] for grant in self._grants if grant.request in non_finite}
            return self._end(is_computed=False)._replace(non_finite=here)
        return self._end(is_computed=True)

    def halt(self) -> BatchResult | None:
        """Give up the batch under way, if there is one: somebody wants to touch its sequences."""
        if not self.is_busy:
            return None
        self._worker.halt()
        return self._end(is_computed=False)

    def is_for_nobody_but(self, request: Request) -> bool:
        """Whether the batch under way would be computed for nobody if this request left."""
        return self.is_busy and all(grant.request is request for grant in self._grants)

    def drop(self, request: Request, *, is_kept: bool = True) -> bool:
        """A request leaves, whether it is computed here or only has its sequence here. False if a batch is under way:
        until that is over its sequence must be left alone. Then what it holds `is_kept`, or not."""
        if request in self._requests:
            del self._requests[request]
            request.skips_steps = False
        if not self.is_busy:
            return True
        assert request.seq is not None
        n_before = request.n_computed
        n_after = n_before + sum(grant.n_tokens for grant in self._grants if grant.request is request)
        self._grants = tuple(grant for grant in self._grants if grant.request is not request)
        self._left.append(
            DroppedSequence(request.seq, n_before, n_after) if is_kept else DroppedSequence(request.seq, 0, 0)
        )
        return False

    def recompute_s(self, start: int, n_tokens: int) -> float:
        """Seconds that computing `n_tokens` from position `start` on would take, in full batches."""
        return self._cost.recompute_s(start, n_tokens, n_rows=self._worker.batch.capacity)

    def _n_rows(self, depth: float, target_s: float | None, *, holds_streams: bool, is_lowest: bool = False) -> int:
        capacity = self._worker.batch.capacity
        if not self._cost.has_seen(depth):
            return min(capacity, max(TILE_ROWS, 8 * untried_rows(depth) // TILE_ROWS * TILE_ROWS))
        if not self._cost.is_warm:
            return min(capacity, 8 * TILE_ROWS)
        allowed_s = LOWEST_BATCH_S if is_lowest else BATCH_S
        if target_s:
            allowed_s = min(allowed_s, (HELD_TARGETS if holds_streams else BATCH_TARGETS) * target_s)
        n_rows = best_size(self._cost, capacity, depth, allowed_s)
        if holds_streams or is_lowest:
            return n_rows
        return max(n_rows, deep_size(self._cost, capacity, is_alone=not target_s))

    def _end(self, *, is_computed: bool, error: DecodeFailed | None = None) -> BatchResult:
        done = BatchResult(self._grants, tuple(self._left), self.seqs, self._worker.computed_s, is_computed, error)
        self._grants, self._left, self.seqs = (), [], []
        return done


def _with_the_rest(n_rows: int, n_all: int, capacity: int) -> int:
    """Rows of a batch that leaves no less than a tile, or nothing, of so many: llama.cpp's flash attention computes
    fewer rows one by one. Behind 4,096 tokens of a 135M model 63 rows took 0.75 s, and 64 took 0.49 s."""
    if n_rows <= TILE_ROWS or not 0 < n_all - n_rows < TILE_ROWS:
        return n_rows
    return n_all if n_all <= capacity else n_rows - TILE_ROWS
