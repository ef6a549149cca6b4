"""The hot loop: one `step` is admit, plan, fill, decode, sample, publish.

Owner: the engine process's main thread; nothing here is thread-safe. The clock is passed in, so a test can own time.
Per step there is one native decode, one native sampling call per finished row, and one message for all requests.

Invariant: every submitted request gets exactly one final delta.
Does not: read or write pipes (`process.py`), tokenize (`prompt.py`), or decide (`scheduler.py`, `kv_pool.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localrun.engine import sampling
from localrun.engine.backend import Backend, DecodeFailed, NoRoom
from localrun.engine.budget import Budget
from localrun.engine.detokenize import TextStream
from localrun.engine.kv_pool import KvPool
from localrun.engine.request import Request
from localrun.engine.scheduler import Scheduler, StepPlan
from localrun.errors import BadRequest, ContextExceeded, EngineFailed, LocalrunError, QueueFull
from localrun.wire import ChosenLogprob, Delta, Finish, Phase, Started, Step, StepStats, Submit, Usage

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


@dataclass
class Totals:
    """Counters since the start."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


class Engine:
    """See the module."""

    def __init__(self, backend: Backend, limits: Limits, clock: Callable[[], float]) -> None:
        if limits.n_slots > min(backend.batch.capacity, backend.n_seqs):
            raise ValueError(f"{limits.n_slots} slots need as many batch rows and sequences")
        self._backend = backend
        self._clock = clock
        self.pool = KvPool(backend, ram_cache_bytes=limits.ram_cache_bytes)
        budget = Budget(target_itl_s=limits.target_itl_s, batch_rows=backend.batch.capacity)
        self.scheduler = Scheduler(n_slots=limits.n_slots, max_queue=limits.max_queue, budget=budget)
        self.totals = Totals()
        self._requests: dict[int, Request] = {}
        self._deltas: dict[int, Delta] = {}
        self._started: list[Started] = []
        self._queue: list[int] = []
        self._queue_sent: list[int] = []
        self._holdings_sent = (0, 0)
        self._step_s = 0.0
        self._n_failed_steps = 0

    @property
    def is_idle(self) -> bool:
        """True when nothing runs or waits and no parked prefix is left to move: the caller may sleep."""
        return not self._requests and not self._deltas and not self.pool.can_settle

    # --- requests come and go ----------------------------------------------------------------------------------

    def submit(self, submit: Submit, tokens: list[int]) -> None:
        """A new request with its prompt already tokenized; the list is the engine's from now on, and grows.

        A refusal is reported by the next `step`.
        """
        try:
            self._check(submit, tokens)
        except LocalrunError as error:
            self.refuse(submit.id, error, n_prompt=len(tokens))
            return
        sampler = self._backend.sampler(submit.sampling, ignore_eos=submit.ignore_eos)
        sampler.accept(tokens)
        most = self._backend.n_ctx - len(tokens)
        request = Request(
            id=submit.id,
            tokens=tokens,
            n_prompt=len(tokens),
            max_output=most if submit.n_predict < 0 else min(submit.n_predict, most),
            sampler=sampler,
            text=TextStream(submit.stop),
            client=submit.client,
            lane=submit.lane,
            arrived_at_s=submit.arrived_at_s,
            ends_at_eog=not submit.ignore_eos,
            n_probs=submit.n_probs if submit.logprobs else None,
        )
        self._requests[request.id] = request
        self.scheduler.submit(request)
        self.totals.prompt_tokens += request.n_prompt

    def refuse(self, request_id: int, error: LocalrunError, *, n_prompt: int = 0) -> None:
        """A request that never starts: its first and last delta says why."""
        self._deltas[request_id] = Delta(
            id=request_id,
            phase=Phase.DONE,
            n_computed=0,
            n_output=0,
            finish=Finish.ERROR,
            usage=Usage(n_prompt, 0, 0, 0.0, 0.0, 0.0),
            error_code=error.code,
            error_message=error.message,
        )

    def cancel(self, request_id: int) -> None:
        """End a request now; its computed prefix stays in the cache. An unknown id is a request that ended already."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, Finish.CANCELLED, self._clock())

    # --- the step ----------------------------------------------------------------------------------------------

    def step(self) -> Step | None:
        """Compute one step and return its news; None if there was neither anything to do nor to say."""
        started_at_s = self._clock()
        self._admit(started_at_s)
        self.pool.settle()
        plan = self._plan()
        if plan.n_rows:
            self._compute(plan, started_at_s)
        return self._publish(plan)

    def _admit(self, now_s: float) -> None:
        """Start waiting requests while slots and cells last, next first."""
        order = self.scheduler.order(now_s)
        for request in order:
            if not self.scheduler.has_free_slot:
                break
            if self.scheduler.leader(request, self.pool.match(request.tokens)):
                continue
            lease = self.pool.acquire(request.tokens) if self._fits(request) else None
            if lease is None:
                break
            is_first_start = not request.was_started
            self.scheduler.start(request, lease.seq, lease.n_cached, now_s)
            if is_first_start:
                self.totals.cached_tokens += request.n_cached
            assert request.slot is not None
            self._started.append(Started(request.id, request.slot, request.n_prompt, request.n_cached))
        self._queue = [request.id for request in order if request.seq is None]

    def _fits(self, request: Request) -> bool:
        """Whether a newcomer leaves every running stream some cells to go on; alone, a request always fits."""
        running = self.scheduler.running
        if not running:
            return True
        n_promised = sum(other.n_pending for other in running) + HEADROOM_CELLS * (len(running) + 1)
        return self.pool.n_obtainable(request.tokens) >= request.n_tokens + n_promised

    def _plan(self) -> StepPlan:
        """A plan that fits into the free cells, after parked prefixes and, if need be, victims made room."""
        span = self.pool.cells.span
        while True:
            plan = self.scheduler.plan(n_free=self.pool.cells.n_cells, span=span)
            if self.pool.make_room(plan.n_rows):
                return plan
            plan = self.scheduler.plan(n_free=self.pool.cells.n_free, span=span)
            if not self.scheduler.is_short(plan):
                return plan
            self._preempt(self.scheduler.victim())

    def _compute(self, plan: StepPlan, started_at_s: float) -> None:
        rows = self._fill(plan)
        try:
            self._backend.decode(plan.n_rows)
        except NoRoom as error:
            self._note_failure(error)
            self._preempt(self.scheduler.victim())
            return
        except DecodeFailed as error:
            self._note_failure(error)
            self._recover(plan, error)
            return
        self._n_failed_steps = 0
        self.pool.cells.place(rows)
        self._advance(plan)
        self._step_s = self._clock() - started_at_s
        self.scheduler.budget.observe(
            n_decode=plan.n_decode_rows, n_prefill=plan.n_prefill_rows, span=self.pool.cells.span, step_s=self._step_s
        )

    def _fill(self, plan: StepPlan) -> list[int]:
        """Write the rows of a plan into the batch. Returns the sequence of each row."""
        batch, row, rows = self._backend.batch, 0, []
        for grant in plan.grants:
            request, end = grant.request, row + grant.n_tokens
            first = request.n_computed
            assert request.seq is not None
            batch.token[row:end] = request.tokens[first : first + grant.n_tokens]
            batch.pos[row:end] = range(first, first + grant.n_tokens)
            batch.seq[row:end] = request.seq
            batch.wants_logits[row:end] = 0
            batch.wants_logits[end - 1] = grant.n_tokens == request.n_pending
            rows += [request.seq] * grant.n_tokens
            row = end
        return rows

    def _advance(self, plan: StepPlan) -> None:
        """After a decode: count, publish prompts to the cache, sample where a request has caught up."""
        row = -1
        for grant in plan.grants:
            request = grant.request
            row += grant.n_tokens
            n_prefill = grant.n_tokens if request.is_prefilling else 0
            request.n_computed += grant.n_tokens
            if n_prefill:
                assert request.seq is not None
                self.pool.publish(request.seq, request.tokens[: request.n_computed])
            has_caught_up = request.n_pending == 0
            self.scheduler.policy.charge(request.client, n_prefill=n_prefill, n_output=int(has_caught_up))
            delta = self._delta(request)
            if has_caught_up:
                self._sample(request, row, delta)
        self.totals.steps += 1
        self.totals.prefill_tokens += plan.n_prefill_rows
        self.totals.decode_tokens += plan.n_decode_rows

    def _sample(self, request: Request, row: int, delta: Delta) -> None:
        """Choose the next token of a request, and end the request if that was the last."""
        now_s = self._clock()
        if request.max_output == 0:
            self._end(request, Finish.LENGTH, now_s)
            return
        token = request.sampler.sample(row)
        if request.ends_at_eog and token in self._backend.eog_tokens:
            self._end(request, Finish.STOP, now_s)
            return
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

    def _publish(self, plan: StepPlan) -> Step | None:
        """All news since the last call as one message; None without news."""
        queue = self._queue if self._queue != self._queue_sent else None
        holdings = (self.pool.cells.n_used, self.pool.n_cached_sequences)
        is_news = self._deltas or self._started or plan.n_rows or queue is not None or holdings != self._holdings_sent
        if not is_news:
            return None
        step = Step(
            sent_at_s=self._clock(),
            deltas=list(self._deltas.values()),
            stats=self._stats(plan),
            started=self._started,
            queue=queue,
        )
        self._deltas, self._started, self._queue_sent, self._holdings_sent = {}, [], self._queue, holdings
        return step

    # --- endings -----------------------------------------------------------------------------------------------

    def _check(self, submit: Submit, tokens: list[int]) -> None:
        if not tokens:
            raise BadRequest("the prompt is empty; send at least one token", field="prompt")
        bad = next((token for token in tokens if not 0 <= token < self._backend.n_vocab), None)
        if bad is not None:
            limit = self._backend.n_vocab - 1
            raise BadRequest(f"token {bad} is not in the vocabulary; ids go from 0 to {limit}", field="prompt")
        if len(tokens) >= self._backend.n_ctx:
            raise ContextExceeded(len(tokens), self._backend.n_ctx)
        sampling.check(submit.sampling, n_vocab=self._backend.n_vocab)
        if self.scheduler.is_queue_full:
            waiting = len(self.scheduler.waiting)
            raise QueueFull(f"{waiting} requests are waiting, which is the limit (--max-queue)", retry_after_s=1.0)

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
        self._queue = [waiting for waiting in self._queue if waiting != request.id]
        del self._requests[request.id]

    def _preempt(self, request: Request) -> None:
        """Take a request off its slot. Its cells become a parked prefix, so coming back costs a copy, not a prefill."""
        assert request.seq is not None
        self.pool.release(request.seq, request.tokens[: request.n_computed])
        self.scheduler.preempt(request)
        self.totals.preemptions += 1

    def _note_failure(self, error: Exception) -> None:
        """After `MAX_FAILED_STEPS` in a row the process gives up, since only a new context can help."""
        self._n_failed_steps += 1
        if self._n_failed_steps >= MAX_FAILED_STEPS:
            raise error

    def _recover(self, plan: StepPlan, error: DecodeFailed) -> None:
        """A step failed: put every sequence back to where it was. A refused batch ends its requests."""
        for grant in plan.grants:
            request = grant.request
            assert request.seq is not None
            self._backend.seq_remove(request.seq, request.n_computed)
            if not error.is_fatal:
                self._end(request, Finish.ERROR, self._clock(), EngineFailed(str(error)))

    def _delta(self, request: Request) -> Delta:
        """The request's entry in this step's news, with its counters brought up to date."""
        delta = self._deltas.get(request.id)
        if delta is None:
            delta = self._deltas[request.id] = Delta(request.id, request.phase, 0, 0, tokens=[])
        delta.phase, delta.n_computed, delta.n_output = request.phase, request.n_computed, request.n_output
        return delta

    def _stats(self, plan: StepPlan) -> StepStats:
        cells, totals = self.pool.cells, self.totals
        return StepStats(
            step=totals.steps,
            step_s=self._step_s,
            n_prefill_rows=plan.n_prefill_rows,
            n_decode_rows=plan.n_decode_rows,
            n_running=len(self.scheduler.running),
            n_queued=len(self.scheduler.waiting),
            kv_cells_used=cells.n_used,
            kv_cells_shared=cells.n_shared,
            cached_sequences=self.pool.n_cached_sequences,
            ram_cache_bytes=self.pool.store.size_bytes,
            prefill_tokens_total=totals.prefill_tokens,
            decode_tokens_total=totals.decode_tokens,
            prompt_tokens_total=totals.prompt_tokens,
            cached_tokens_total=totals.cached_tokens,
            preemptions_total=totals.preemptions,
        )
