"""The hot loop: one `step` is admit, plan, fill, decode, sample, publish.

Owner: the engine process's main thread; nothing here is thread-safe. The clock is passed in, so a test can own time.
Per step there are at most two native decodes, one native sampling call per finished row, and one message for all.

Where the backend can, long prompts are computed in the background (`staging.py`), and a step is the streams' and the
short prompts' alone.

Invariant: every submitted request gets exactly one final delta.
Does not: read or write pipes (`process.py`), tokenize (`prompt.py`), or decide (`scheduler.py`, the pools).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from localrun.engine import intake, rows
from localrun.engine.backend import Backend, DecodeFailed, NoRoom
from localrun.engine.budget import Budget
from localrun.engine.disk_record import DiskTier
from localrun.engine.kv_mode import KvMode
from localrun.engine.kv_store import KvStore
from localrun.engine.pool import Pool
from localrun.engine.request import Request
from localrun.engine.scheduler import Grant, Scheduler, StepPlan
from localrun.engine.staging import Staging
from localrun.engine.totals import Totals
from localrun.errors import EngineFailed, LocalrunError
from localrun.wire import ChosenLogprob, Delta, Finish, Phase, Started, Step, Submit

log = logging.getLogger("localrun.engine")

# A step that fails as a whole is tried again this often before the process gives up and lets itself be replaced.
MAX_FAILED_STEPS = 3
# Cells that every running stream must be able to take before another request may start: a newcomer that fits only just
# would be preempted a few steps later.
HEADROOM_CELLS = 32


@dataclass(frozen=True)
class Limits:
    """What the engine was opened with. See `wire.Open`."""

    n_slots: int
    max_queue: int
    target_itl_s: float
    ram_cache_bytes: int


class Engine:
    """See the module."""

    def __init__(
        self, backend: Backend, limits: Limits, clock: Callable[[], float], disk: DiskTier | None = None
    ) -> None:
        if limits.n_slots > min(backend.batch.capacity, backend.n_seqs):
            raise ValueError(f"{limits.n_slots} slots need as many batch rows and sequences")
        self._backend = backend
        self._clock = clock
        self._target_itl_s = limits.target_itl_s
        staging_rows = backend.staging_batch.capacity if backend.n_staging_seqs else 0
        budget = Budget(batch_rows=backend.batch.capacity, mixes_rows=backend.mixes_rows, staging_rows=staging_rows)
        store = KvStore(limits.ram_cache_bytes, disk, budget.recompute_s)
        self._kv = KvMode(backend, store, clock, self._direct_tokens)
        self._staging = Staging(backend, clock)
        self.scheduler = Scheduler(n_slots=limits.n_slots, max_queue=limits.max_queue, budget=budget)
        self.totals = Totals()
        self._requests: dict[int, Request] = {}
        self._deltas: dict[int, Delta] = {}
        self._started: list[Started] = []
        self._holdings_sent = (0, 0)
        self._n_failed_steps = 0
        self._is_checked = True

    @property
    def pool(self) -> Pool:
        """The pool in force."""
        return self._kv.pool

    @property
    def is_idle(self) -> bool:
        """True when nothing runs or waits, and no kept prefix is left to move or to write: the caller may sleep."""
        is_tidy = self._is_checked and not self.pool.can_settle and not self.pool.store.can_persist
        return is_tidy and not self._requests and not self._deltas

    # --- requests come and go ----------------------------------------------------------------------------------

    def submit(self, submit: Submit, tokens: list[int]) -> None:
        """A new request with its prompt already tokenized; the list is the engine's from now on, and grows.

        A refusal is reported by the next `step`.
        """
        try:
            intake.check(submit, tokens, self._backend)
            self.scheduler.check_queue()
        except LocalrunError as error:
            self.refuse(submit.id, error, n_prompt=len(tokens))
            return
        request = intake.new_request(submit, tokens, self._backend, target_itl_s=self._target_itl_s)
        late = self.scheduler.too_late(request, submit.deadline_s, self.pool.match, now_s=self._clock())
        if late is not None:
            request.sampler.close()
            self.refuse(submit.id, late, n_prompt=len(tokens))
            return
        request.sampler.accept(tokens)
        self._requests[request.id] = request
        self.scheduler.submit(request)
        self.totals.prompt_tokens += request.n_prompt

    def refuse(self, request_id: int, error: LocalrunError, *, n_prompt: int = 0) -> None:
        """A request that never starts: its first and last delta says why."""
        self._deltas[request_id] = intake.refusal(request_id, error, n_prompt=n_prompt)

    def cancel(self, request_id: int) -> None:
        """End a request now; its computed prefix stays in the cache. An unknown id is a request that ended already."""
        request = self._requests.get(request_id)
        if request is not None:
            self._recall(request)
            self._end(request, Finish.CANCELLED, self._clock())

    def clear_cache(self, *, ram: bool, disk: bool) -> None:
        """Forget kept prefixes: those in cells and memory, those on disk, or both. Running requests lose nothing."""
        self._drop_staging()
        self.pool.clear(ram=ram, disk=disk)

    def close(self) -> None:
        """End what runs, and save what was computed to memory, whence the store can write it to disk."""
        for request_id in list(self._requests):
            self.cancel(request_id)
        self._drop_staging()
        self.pool.retire()

    def _direct_tokens(self) -> int:
        """New tokens that a prompt may have and be computed among the streams."""
        return self.scheduler.budget.direct_tokens(self.scheduler.target_s or self._target_itl_s)

    # --- the step ----------------------------------------------------------------------------------------------

    def step(self) -> Step | None:
        """Compute one step and return its news; None if there was neither anything to do nor to say."""
        now_s = self._clock()
        if self._staging.is_over() and not self._staging.is_turn_near(self.scheduler.target_s):
            self._harvest()
        self._fit_kv(now_s)
        self._admit(now_s)
        self._tidy()
        if not self._staging.is_busy and (grants := self.scheduler.plan_staging()):
            self._staging.start(grants)
        if self._staging.is_busy and not self.scheduler.has_streams:
            self._staging.wait()
        elif self._staging.wait_for_turn(self.scheduler.target_s):
            self._compute(self._plan())
        return self._publish()

    def _tidy(self) -> None:
        """Small work between steps: at most one copy of each kind, and more only when nobody is there."""
        self.pool.settle()
        moved = self.pool.compact()
        if moved is not None:
            old, new = moved
            next(request for request in self.scheduler.running if request.seq == old).seq = new
        if self._requests:
            self._is_checked = False
        elif self.pool.store.can_persist:
            self.pool.store.persist()
        elif not self._is_checked and not self.pool.can_settle:
            self._is_checked = True
            self.pool.check_integrity()

    def _fit_kv(self, now_s: float) -> None:
        """Change the KV cache to what the requests need."""
        n_longest = max((request.n_tokens for request in self._requests.values()), default=0)
        split = self._kv.change(n_longest, is_running=bool(self.scheduler.running), now_s=now_s)
        if split is None:
            return
        log.info("the KV cache is %s from now on", "split" if split else "one pool")
        self._drop_staging()
        for request in list(self.scheduler.running):
            self._preempt(request)
        self._kv.switch(split=split)

    def _admit(self, now_s: float) -> None:
        """Start waiting requests while slots and cells last, next first."""
        for request in self.scheduler.next_up(now_s):
            if not self.scheduler.can_start(request):
                continue
            n_matched = self.pool.match(request.tokens)
            leader = self.scheduler.leader(request, n_matched)
            if leader and leader.seq is not None and self.pool.follow(leader.seq, request.tokens, n_matched):
                continue
            if self.pool.must_wait(request.tokens, n_matched):
                continue
            lease = self.pool.acquire(request.tokens) if self._make_way(request) else None
            if lease is None:
                break
            is_first_start = not request.was_started
            self.scheduler.start(request, lease.seq, lease.n_cached, now_s)
            request.is_staged = lease.seq >= self._backend.n_seqs
            if is_first_start:
                self.totals.cached_tokens += request.n_cached
            assert request.slot is not None
            self._started.append(Started(request.id, request.slot, request.n_prompt, request.n_cached))

    def _make_way(self, request: Request) -> bool:
        """Whether there is a slot and cells for a newcomer, taken from lower lanes if that is what it takes."""
        below = self.scheduler.outranked(request)
        n_most = sum(other.n_tokens + HEADROOM_CELLS for other in below)
        if self._n_missing(request) > n_most and len(below) < len(self.scheduler.running):
            return False
        while not self.scheduler.has_free_slot or self._n_missing(request) > 0:
            if not below:
                return False
            self._preempt(below.pop())
        return True

    def _n_missing(self, request: Request) -> int:
        """Cells that a newcomer lacks if every running stream is to have some to go on; alone, a request lacks none."""
        running = self.scheduler.running
        if not running:
            return 0
        n_promised = sum(other.n_pending for other in running) + HEADROOM_CELLS * (len(running) + 1)
        return request.n_tokens + n_promised - self.pool.n_obtainable(request.tokens)

    def _plan(self) -> StepPlan:
        """A plan that fits into the free cells, after parked prefixes and, if need be, victims made room."""
        for request in self.scheduler.running:
            assert request.seq is not None
            request.next_stop = self.pool.next_stop(request.seq, request.n_computed)
        left_s = None if self._backend.mixes_rows else self._staging.left_s(self.scheduler.target_s)
        while True:
            plan = self.scheduler.plan(n_free=self.pool.cells.n_cells, left_s=left_s)
            if self.pool.make_room(plan.n_rows):
                return plan
            plan = self.scheduler.plan(n_free=self.pool.cells.n_free, left_s=left_s)
            if not self.scheduler.is_short(plan):
                return plan
            self._preempt(self.scheduler.victim())

    def _compute(self, plan: StepPlan) -> None:
        """One native decode, and what follows from it."""
        if not plan.n_rows:
            return
        started_at_s = self._clock()
        depth = sum(grant.request.n_computed * grant.n_tokens for grant in plan.grants) / plan.n_rows
        seqs = rows.fill(self._backend.batch, plan.grants)
        try:
            self._backend.decode(plan.n_rows)
        except NoRoom as error:
            self._note_failure(error)
            self._preempt(self.scheduler.victim())
            return
        except DecodeFailed as error:
            self._note_failure(error)
            self._recover(plan.grants, error)
            return
        self._n_failed_steps = 0
        self.pool.cells.place(seqs)
        self._advance(plan.grants)
        step_s = self._clock() - started_at_s
        self.totals.note_step(n_prefill=plan.n_prefill_rows, n_decode=plan.n_decode_rows, step_s=step_s)
        self.scheduler.observe(plan, depth=depth, step_s=step_s)
        self._staging.note_step(step_s, has_streams=plan.n_decode_rows > 0)

    def _harvest(self) -> None:
        """Take what the background computed. Requests whose prompt is done go on among the streams."""
        grants, n_rows, depth = self._staging.grants, self._staging.n_rows, self._staging.depth
        try:
            seqs, seconds = self._staging.finish()
        except NoRoom as error:
            raise RuntimeError("a staged prompt is longer than its stream") from error
        except DecodeFailed as error:
            self._note_failure(error)
            self._recover(grants, error)
            return
        self._n_failed_steps = 0
        self.pool.cells.place(seqs)
        self._advance(grants)
        self.totals.note_rows(n_prefill=n_rows, n_decode=0)
        self.scheduler.observe_staging(n_rows=n_rows, depth=depth, seconds=seconds)
        for request, _ in grants:
            if request.n_pending == 1:
                assert request.seq is not None
                request.seq = self.pool.unstage(request.seq)
                request.is_staged = False

    def _recall(self, request: Request) -> None:
        """Give up what the background computes if this request is there: its sequence is about to be touched."""
        if request.is_staged:
            self._drop_staging()

    def _drop_staging(self) -> None:
        for request in self._staging.drop():
            assert request.seq is not None
            request.n_computed = self.pool.rewind(request.seq, request.n_computed)

    def _advance(self, grants: tuple[Grant, ...]) -> None:
        """After a decode: count, publish prompts to the cache, sample where a request has caught up."""
        row, caught_up = -1, []
        for request, n_tokens in grants:
            row += n_tokens
            is_prefilling = request.is_prefilling
            request.n_computed += n_tokens
            if is_prefilling:
                assert request.seq is not None
                self.pool.publish(request.seq, request.tokens[: request.n_computed])
            self._delta(request)
            if request.n_pending == 0:
                self.scheduler.policy.charge(request.client, n_output=1)
                caught_up.append((request, row))
        for request, _ in caught_up:
            if request.max_output == 0:
                self._end(request, Finish.LENGTH, self._clock())
        caught_up = [(request, row) for request, row in caught_up if request.max_output]
        tokens = self._backend.sample([(request.sampler, row) for request, row in caught_up])
        for (request, row), token in zip(caught_up, tokens, strict=True):
            self._take(request, row, token)

    def _take(self, request: Request, row: int, token: int) -> None:
        """A request's next token was chosen; end the request if that was the last."""
        now_s = self._clock()
        if request.ends_at_eog and token in self._backend.eog_tokens:
            self._end(request, Finish.STOP, now_s)
            return
        delta = self._delta(request)
        piece = self._backend.piece(token)
        request.append(token, now_s)
        delta.tokens.append(token)
        delta.text += request.text.feed(piece)
        delta.n_output = request.n_output
        delta.phase = Phase.DECODE
        if request.n_probs is not None:
            logprob, top = self._backend.logprobs(row, token, request.n_probs)
            delta.logprobs = [ChosenLogprob(token, piece, logprob, top)]
        if request.text.stopped is not None:
            self._end(request, Finish.STOP, now_s)
        elif request.n_output >= request.max_output:
            self._end(request, Finish.LENGTH, now_s)

    def _publish(self) -> Step | None:
        """All news since the last call as one message; None without news."""
        now_s = self._clock()
        queue = self.scheduler.queue_news(now_s)
        totals = self.totals
        n_rows = totals.n_prefill_rows + totals.n_decode_rows
        holdings = (self.pool.cells.n_used, self.pool.n_cached_sequences)
        is_news = self._deltas or self._started or n_rows or queue is not None or holdings != self._holdings_sent
        if not is_news:
            return None
        step = Step(
            sent_at_s=now_s,
            deltas=list(self._deltas.values()),
            stats=totals.stats(self.pool, self.scheduler),
            started=self._started,
            queue=queue.ids if queue is not None else None,
            waits_s=queue.waits_s if queue is not None else None,
        )
        totals.end_step()
        self._deltas, self._started, self._holdings_sent = {}, [], holdings
        return step

    # --- endings -----------------------------------------------------------------------------------------------

    def _end(self, request: Request, finish: Finish, now_s: float, error: LocalrunError | None = None) -> None:
        """The request's last delta. Its computed tokens stay as a prefix, unless the step that made them failed."""
        delta = self._delta(request)
        delta.text += request.text.finish()
        delta.phase, delta.finish, delta.usage = Phase.DONE, finish, request.usage(now_s)
        delta.stop_text = request.text.stopped
        if error is not None:
            delta.error_code, delta.error_message = error.code, error.message
        if request.seq is not None:
            if error is None:
                self.pool.release(request.seq, request.tokens[: request.n_computed])
            else:
                self.pool.forget(request.seq)
        request.sampler.close()
        self.scheduler.end(request)
        del self._requests[request.id]

    def _preempt(self, request: Request) -> None:
        """Take a request off its slot. Its cells become a parked prefix, so coming back costs a copy, not a prefill."""
        self._recall(request)
        assert request.seq is not None
        self.pool.release(request.seq, request.tokens[: request.n_computed])
        self.scheduler.preempt(request, self._clock())
        self._delta(request)
        self.totals.preemptions += 1

    def _note_failure(self, error: Exception) -> None:
        """After `MAX_FAILED_STEPS` in a row the process gives up, since only a new context can help."""
        self._n_failed_steps += 1
        if self._n_failed_steps >= MAX_FAILED_STEPS:
            raise error

    def _recover(self, grants: tuple[Grant, ...], error: DecodeFailed) -> None:
        """A step failed: put every sequence back to where it was. A refused batch ends its requests."""
        for request, _ in grants:
            assert request.seq is not None
            request.n_computed = self.pool.rewind(request.seq, request.n_computed)
            if not error.is_fatal:
                self._end(request, Finish.ERROR, self._clock(), EngineFailed(str(error)))

    def _delta(self, request: Request) -> Delta:
        """The request's entry in this step's news, with its counters brought up to date."""
        delta = self._deltas.get(request.id)
        if delta is None:
            delta = self._deltas[request.id] = Delta(request.id, request.phase, 0, 0, tokens=[])
        delta.phase, delta.n_computed, delta.n_output = request.phase, request.n_computed, request.n_output
        return delta
