"""The hot loop: one `step` is collect, admit, plan, compute, report.

Owner: the engine process's main thread; nothing here is thread-safe. The clock is passed in, so tests control time. If
the backend has a background, long prompts are computed there, and a step serves only streams and short prompts. Media
are encoded beside the steps (`encoding.py`), and their rows have a step, or a batch of the background, for themselves.
While no request arrives or ends, a step repeats the previous plan (`Scheduler.reusable_plan`), and nothing that the
main thread does in it takes time proportional to the number of cells.

Invariant: every submitted request gets exactly one final delta.
Does not: read or write pipes (`pipes.py`), choose tokens (`answers.py`), or decide (`scheduler.py`, `admission.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localrun.engine.adapters import AdapterQueue, Loader
from localrun.engine.answers import Answers, LogitsRow, non_finite_error
from localrun.engine.backend import BASE, AdapterSet, Backend, DecodeFailed, MediaRows, NoRoom, StepAborted, never_abort
from localrun.engine.cache.cache import Cache
from localrun.engine.cache.tiers import DiskTier, Tiers
from localrun.engine.encoding import ENCODED_PART, Encodings
from localrun.engine.report import Beside, Report, StepTimes, at_once
from localrun.engine.request import Request
from localrun.engine.sample.text import MediaSpan, Prompt
from localrun.engine.schedule.admission import Admission, Pool, is_too_long
from localrun.engine.schedule.background import MOVE_TO_STREAM_S, BackgroundPrefill, BatchResult
from localrun.engine.schedule.budget import TILE_ROWS, Budget, CostModel
from localrun.engine.schedule.policy import LOWEST_RANK
from localrun.engine.schedule.scheduler import (
    NOTHING,
    Grant,
    Scheduler,
    StepPlan,
    StreamRows,
    fill_batch,
    non_finite_requests,
)
from localrun.engine.speculate.speculation import Speculation
from localrun.errors import EngineFailed, LocalrunError
from localrun.wire import Finish, KvRun, MediaCounts, Step, Submit

# After so many failed steps in a row the process gives up and lets the daemon replace it.
MAX_FAILED_STEPS = 3
# Streams without a latency target have a step at least this often while something is encoded.
ENCODING_TURN_S = 2.0
NO_MEDIA = MediaCounts()


@dataclass(frozen=True)
class Limits:
    """What the engine was opened with. See `wire.Open`."""

    n_slots: int
    max_queue: int
    target_itl_s: float
    ram_cache_bytes: int


class Engine:
    """See the module. `adapters` are for requests that name none, and the `loader` is where others are loaded; without
    one that is a thread. What is done beside the steps `ring`s, in any thread, and until then nothing may be worth a
    step for `wait_s`. The `cpu_clock` is that of the thread that steps, in seconds. Without `beside` there are no maps
    of the KV cells; and an engine that `checks_books` does so whenever it becomes idle."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        clock: Callable[[], float],
        disk: DiskTier | None = None,
        *,
        beside: Beside[list[KvRun]] | None = at_once,
        speculation: Speculation | None = None,
        adapters: AdapterSet = BASE,
        loader: Loader | None = None,
        ring: Callable[[], None] = lambda: None,
        cpu_clock: Callable[[], float] = lambda: 0.0,
        checks_books: bool = True,
    ) -> None:
        if limits.n_slots > min(backend.batch.capacity, backend.n_seqs):
            raise ValueError(f"{limits.n_slots} slots need as many batch rows and sequences")
        self._backend = backend
        self._clock = clock
        self.background = background = BackgroundPrefill(lambda: backend.worker, CostModel(backend.tile_waste))
        budget = Budget(batch_rows=backend.batch.capacity, mixes_rows=backend.mixes_rows)
        self._takes_media = backend.projector is not None
        encoded_bytes = limits.ram_cache_bytes // ENCODED_PART if self._takes_media else 0
        tiers = Tiers(
            limits.ram_cache_bytes - encoded_bytes,
            disk,
            lambda *tokens: (background if background.is_there else budget).recompute_s(*tokens),
        )
        self.scheduler = Scheduler(n_slots=limits.n_slots, max_queue=limits.max_queue, budget=budget)
        self.wait_s = 0.0
        backend.tell(ring)
        self._adapters = AdapterQueue(backend, adapters, ring, loader)
        self._admission = Admission(
            backend, self.scheduler, background, self._preempt, target_itl_s=limits.target_itl_s, adapters=adapters
        )
        self.cache = Cache(backend, tiers, clock, self._admission.goes_to_background)
        self._requests: dict[int, Request] = {}
        self._rows = StreamRows()
        self._times = StepTimes(clock, cpu_clock)
        self._report = Report(backend, beside, self._times)
        self.totals = self._report.totals
        self._n_failed_steps = 0
        # Whether there may be rows in cells that were computed, perhaps, and given up before anybody looked at them.
        self._has_unseen_rows = False
        self._puts_off = False
        # Whose streams in the pool, by their company, had no step since the background's last batch.
        self._owed: set[bytes] = set()
        self._is_checked, self._checks_books = True, checks_books
        self._answers = Answers(backend, self._report, clock, ring)
        waits = self.scheduler.waits
        self._encodings: Encodings[Request] = Encodings(backend.projector, encoded_bytes, clock, waits.observe_encoding)
        waits.is_encoded = self._encodings.has
        self._speculation = speculation or Speculation(backend, clock)
        self.totals.drafts = self._speculation.counts
        has_drafter, drop_drafts = self._speculation.has_drafter, self._speculation.drop
        self._pool = Pool(self.cache, self.scheduler, background, self._preempt, has_drafter, drop_drafts)

    @property
    def is_idle(self) -> bool:
        """True when nothing runs or waits, and no kept prefix has to be moved or written: the caller may sleep."""
        is_tidy = self._is_checked and not self.cache.can_save_next and not self.cache.tiers.can_persist
        return is_tidy and not self._requests and not self._report.has_deltas

    @property
    def can_defer_output(self) -> bool:
        """Whether the last step's news may wait until the next step computes: the next one starts at once, and nothing
        else is due before it."""
        is_reusable = self.scheduler.reusable_plan() is not None and not self.scheduler.waiting
        return self._backend.overlaps and is_reusable and not (self.cache.can_save_next or self._encodings.is_busy)

    def call_during_steps(self, on_compute: Callable[[], None]) -> None:
        """Call `on_compute` while a step computes, if the engine `can_defer_output`."""
        self._backend.on_compute = on_compute

    # --- requests come and go ----------------------------------------------------------------------------------

    def submit(
        self, submit: Submit, tokens: list[int], prediction: Sequence[int] = (), chunks: tuple[MediaSpan, ...] = ()
    ) -> None:
        """Take a new request with the tokens and chunks of its prompt (`text.prompt_of`), and the tokens of
        `Submit.prediction`. The engine owns the list from now on, and it grows.

        A refusal is reported by the next `step`.
        """
        self._times.begin()
        try:
            request = self._admission.take(submit, Prompt(tokens, chunks), self.cache.match, now_s=self._clock())
        except LocalrunError as error:
            self.refuse(submit.id, error, n_prompt=len(tokens))
            return
        self._requests[request.id] = request
        self._report.submitted(request)
        if request.adapters.adapters:
            self._adapters.add(request)
        if request.scoring is None:
            self._speculation.begin(request, submit, prediction)
        over = self._answers.begin(request, submit)
        if over is not None:
            self._end(*over)

    def refuse(self, request_id: int, error: LocalrunError | None, *, n_prompt: int = 0) -> None:
        """A request never starts: its only delta says why, or without an error that it was cancelled."""
        self._report.refused(request_id, error, n_prompt=n_prompt)

    def cancel(self, request_id: int) -> None:
        """End a request now; its computed prefix stays in the cache. An unknown id means that it has already ended."""
        self._times.begin()
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, Finish.CANCELLED, self._clock())

    def clear_cache(self, *, ram: bool, disk: bool) -> None:
        """Forget kept prefixes: those in cells and memory, those on disk, or both. Running requests lose nothing."""
        self._times.begin()
        self._halt_background()
        self.cache.clear(ram=ram, disk=disk)
        if ram:
            self._encodings.clear()

    def close(self) -> None:
        """End all requests, and save what they computed to memory, from where the store can write it to disk."""
        for request_id in list(self._requests):
            self.cancel(request_id)
        self._halt_background()
        self._adapters.close()
        self._encodings.close()
        self._answers.close()
        self.cache.retire()

    # --- the step ----------------------------------------------------------------------------------------------

    def step(self, should_abort: Callable[[], bool] = never_abort) -> Step | None:
        """One round. Returns its news; None if there was nothing to do and nothing to report. What it computes for the
        lowest lane alone is given up when `should_abort`."""
        self.wait_s = 0.0
        self._times.begin()
        self._times.lap("messages")
        now_s = self._clock()
        self._collect(now_s)
        self._times.lap("collect")
        self._admit(now_s)
        plan = self._plan()
        self._times.lap("plan")
        in_pool = plan.is_long
        if in_pool:
            self._backend.turn_to(pool=True)
            self._owed.discard(plan.batch_group)
        self._compute(plan, now_s, should_abort)
        self._times.lap("tokens")
        if in_pool:
            self._backend.turn_to(pool=False)
        if not plan.n_rows and self._is_waited_for:
            self.wait_s = self._answers.look_again_s
        media = self._encodings.counts if self._takes_media else NO_MEDIA
        return self._report.take(self.cache, self.scheduler, media, self._clock())

    def _collect(self, now_s: float) -> None:
        """Collect what became ready beside the steps: a batch of the background, rows of media, adapters, grammars,
        tokens of slow grammars."""
        background, scheduler = self.background, self.scheduler
        if background.is_over:
            is_near = bool(background.completes) and scheduler.is_turn_near(now_s, MOVE_TO_STREAM_S)
            # Streams have their step first, but only one: with a very short target their turn is always near.
            self._puts_off = is_near and not self._puts_off
            if not self._puts_off:
                self._take_batch(background.collect())
        if self._takes_media:
            for request, error in self._encodings.collect():
                self._end(request, Finish.ERROR, now_s, error)
        if self._adapters.waiting or self._adapters.loading:
            for request, error in self._adapters.collect():
                self._end(request, Finish.ERROR, now_s, error)
        for over in self._answers.collect(now_s):
            self._end(*over)

    def _admit(self, now_s: float) -> None:
        """Start requests, and move those that outgrow their cells; tidy these; begin the background's next batch."""
        if self._backend.is_split:
            self._pool.take_outgrown()
            self._pool.arrange_guests()
        for request, is_first in self._admission.start(self.cache, now_s):
            self._report.started(request, is_first=is_first)
        self._times.lap("admit")
        self._tidy()
        if self._takes_media:
            self._encode()
            self._times.lap("background")
        if self.background.has_prompts and not self.background.is_busy:
            self._begin_batch()
            self._times.lap("background")

    def _plan(self) -> StepPlan:
        """Decide who gets how many rows, within the free cells. Parked prefixes make room first, then, if need be,
        victims. While it is the background's turn, or an encoding's, nobody gets rows, and the next step waits."""
        background, encodings = self.background, self._encodings
        if background.is_busy:
            due_s = self.scheduler.due_in_s(self._clock())
            is_outranked = background.is_lowest and self.scheduler.has_higher_prompt
            if due_s > 0 and not (is_outranked or background.is_over or encodings.is_over):
                self.wait_s = due_s
                return NOTHING
        elif encodings.is_busy:
            due_s = self.scheduler.due_in_s(self._clock(), most_s=ENCODING_TURN_S)
            if due_s > 0 and not encodings.is_over:
                self.wait_s = due_s
                return NOTHING
        reusable = self.scheduler.reusable_plan()
        if reusable is not None and self.cache.make_room(reusable.n_rows, in_pool=reusable.is_long):
            return self._with_drafts(reusable)
        for request in self.scheduler.running:
            assert request.seq is not None
            request.next_stop = self.cache.next_stop(request.seq, request.n_computed)
        left_s = None if self._backend.mixes_rows else self.scheduler.due_in_s(self._clock())
        while True:
            plan = self.scheduler.plan(n_free=self._backend.n_cells, left_s=left_s)
            in_pool = plan.is_long
            if self.cache.make_room(plan.n_rows, in_pool=in_pool):
                return self._with_drafts(plan) if plan.is_reusable else plan
            plan = self.scheduler.plan(n_free=self.cache.n_free(in_pool=in_pool), left_s=left_s)
            if not self.scheduler.is_short(plan):
                return plan
            self._preempt(self.scheduler.victim(self._admission.pooled if in_pool else ()))

    def _compute(self, plan: StepPlan, now_s: float, should_abort: Callable[[], bool]) -> None:
        """One native decode, and what follows from it: a token for each request that caught up, and more for those
        whose drafts were right."""
        if not plan.n_rows:
            return
        self._report.begin_step(self.cache.cells, self.scheduler.running, now_s)
        began_s = self._clock()
        depth = plan.depth
        try:
            self._backend.use(plan.adapters)
            seqs = self._decode_media(plan.grants[0]) if plan.is_media else self._decode(plan, should_abort)
        except NoRoom as error:
            self._note_failure(error)
            self._preempt(self.scheduler.victim(self._admission.pooled if plan.is_long else ()))
            # Parked sequences take cells, too.
            n_free = self.cache.n_free(in_pool=plan.is_long)
            self.cache.make_room(n_free + plan.n_rows, in_pool=plan.is_long)
            return
        except (DecodeFailed, StepAborted) as error:
            for request, _, _ in plan.grants:
                request.was_aborted = isinstance(error, StepAborted)
            self._speculation.broken_off()
            self._take_back(plan.grants, error if isinstance(error, DecodeFailed) else None)
            self._has_unseen_rows = True
            return
        finally:
            self._times.lap("decode")
        self._n_failed_steps = 0
        self.cache.cells.place(seqs)
        non_finite = non_finite_requests(plan.grants, self._backend.is_finite)
        if non_finite:
            self._take_back(plan.grants, None)
            self._isolate(non_finite)
            return
        self._speculation.decoded(plan)
        self._advance(plan.grants, is_reusable=plan.is_reusable, has_drafts=plan.n_draft_rows > 0)
        ended_s = self._clock()
        self._report.computed(plan, ended_s - began_s)
        self._speculation.computed(plan, ended_s)
        self.scheduler.observe(plan, depth=depth, step_s=ended_s - began_s, ended_at_s=ended_s)

    @property
    def _is_waited_for(self) -> bool:
        """Whether there is nothing to do until something beside the steps is over, which then rings."""
        scheduler, cache = self.scheduler, self.cache
        is_under_way = self._answers.is_waited_for or self._adapters.loading
        return (
            bool(is_under_way)
            and all(request.awaits_something for request in scheduler.waiting)
            and all(request.skips_steps for request in scheduler.running)
            and not (self.background.has_prompts or self.background.is_over or cache.restoring or cache.can_save_next)
        )

    # --- the verbs' parts --------------------------------------------------------------------------------------

    def _decode(self, plan: StepPlan, should_abort: Callable[[], bool]) -> list[int]:
        """Compute rows of text. Returns the sequence of each. A request's step is aborted at most once in a row:
        otherwise a flood of requests, each of which is refused or cancelled, could starve the batch lane."""
        batch = self._backend.batch
        # The background's batches use the pool's rows in between.
        seqs = fill_batch(batch, plan.grants) if plan.is_long else self._rows.fill(batch, plan)
        if all(request.rank >= LOWEST_RANK and not request.was_aborted for request, _, _ in plan.grants):
            self._backend.decode(plan.n_rows, should_abort)
        else:
            self._backend.decode(plan.n_rows)
        return seqs

    def _decode_media(self, grant: Grant) -> list[int]:
        """Compute rows of a chunk. Returns the sequence of each."""
        request, n_rows, _ = grant
        span = request.next_chunk
        assert span is not None
        assert request.seq is not None
        rows = self._encodings.rows(span)
        assert rows is not None, "a chunk is to be computed that is not encoded"
        first = request.n_computed - span.start
        self._backend.batch.adapter_hash = request.adapters.hash
        self._backend.decode_media(MediaRows(request.seq, span.start, span.chunk, rows, first, n_rows))
        return [request.seq] * n_rows

    def _encode(self) -> None:
        """Start encoding the media that running requests need next. A request whose media is not encoded yet skips
        steps."""
        restoring, background = self.cache.restoring, self.background
        wanted = []
        for request in self.scheduler.running:
            if request.chunks:
                assert request.seq is not None
                span = request.chunk_after(max(request.n_computed, restoring.get(request.seq, 0)))
                if span is not None:
                    wanted.append((request, span))
        self._encodings.want(wanted)
        for request, _ in wanted:
            if request.seq not in restoring and request not in background:
                span = request.next_chunk
                request.skips_steps = span is not None and self._encodings.rows(span) is None

    def _with_drafts(self, plan: StepPlan) -> StepPlan:
        """A steady plan with what is worth drafting for its streams. Nobody drafts while prompts want the processors,
        and nothing is evicted for a draft."""
        background = self.background
        if self._encodings.is_busy or background.is_busy or plan.grants[0].request.isolated_until:
            return plan
        n_free = self.cache.n_free(in_pool=plan.is_long)
        self._times.lap("plan")
        n_beside = len(self.scheduler.running) - len(plan.grants)
        plan = self._speculation.extend(
            plan, n_free, n_beside, lambda: self.scheduler.step_target_s, lambda: self.cache.attend_s
        )
        self._times.lap("drafts")
        return plan

    def _begin_batch(self) -> None:
        """Begin the background's next batch, and make room for it. Streams in the pool have a step before it, and none
        while it computes."""
        background, cache, running = self.background, self.cache, self.scheduler.running
        admission = self._admission
        if any(request.is_long and request.batch_group in self._owed and not request.sits_out for request in running):
            return
        n_rows = background.n_pending
        while not cache.make_room(min(n_rows, TILE_ROWS), in_pool=True) and len(admission.pooled) > 1:
            self._preempt(self.scheduler.victim(admission.pooled))
            n_rows = background.n_pending
        cache.make_room(n_rows, in_pool=True)
        held = [request for request in running if request.is_long]
        begun = background.begin(
            self.scheduler.target_s,
            self._encodings.rows,
            most_rows=cache.n_free(in_pool=True),
            holds_streams=bool(held),
        )
        if begun:
            for request in held:
                request.is_held = True
            cache.warm_streams(request.n_tokens for request in background.completes if not is_too_long(request, cache))

    def _tidy(self) -> None:
        """Small work between steps: at most one copy of each kind, and more only when there are no requests."""
        brought = self.cache.restore_next()
        if brought is not None:
            request = self.scheduler.at(brought[0])
            request.n_computed, request.skips_steps = brought[1], request.seq in self.cache.restoring
        self._times.lap("restore")
        if not self._computes_prompts_alone:
            self.cache.save_next()
        self._times.lap("save")
        moved = self.cache.compact()
        if moved is not None:
            self.scheduler.move(self.scheduler.at(moved[0]), moved[1])
        self._times.lap("move")
        if self._requests:
            self._is_checked = False
        elif self.cache.tiers.can_persist:
            self.cache.tiers.persist()
        elif not self._is_checked and not self.cache.can_save_next:
            self._is_checked = True
            if self._checks_books:
                self.cache.check_integrity()

    @property
    def _computes_prompts_alone(self) -> bool:
        """Whether every processor computes prompts, and nobody waits for what a thread beside them would do: it would
        hold them up for much longer than it takes."""
        background, scheduler = self.background, self.scheduler
        return (
            background.is_busy and not scheduler.waiting and all(request.skips_steps for request in scheduler.running)
        )

    def _take_batch(self, batch: BatchResult) -> None:
        """The background is done with a batch: finished prompts continue as streams, and what dropped requests left is
        kept."""
        for request in self.scheduler.running:
            if request.is_long:  # one at the end of its stream is held until it is moved
                request.is_held = False
                self._owed.add(request.batch_group)
        if batch.is_computed:
            self.cache.cells.place(batch.seqs)
        for seq, n_before, n_after in batch.left:
            self.cache.release(seq, n_after if batch.is_computed else self.cache.rewind(seq, n_before))
        if not batch.is_computed:
            self._take_back(batch.grants, batch.error)
            if batch.non_finite is not None:
                self._isolate(batch.non_finite)
            else:
                self._has_unseen_rows = True
            return
        self._n_failed_steps = 0
        self._advance(batch.grants)
        self.totals.note_background(len(batch.seqs), batch.seconds)
        self.scheduler.waits.observe_step(n_decode=0, n_prefill=len(batch.seqs), step_s=batch.seconds)
        for request, _, _ in batch.grants:
            if request.n_computed == request.last_start and self._leave_background(request):
                assert request.seq is not None
                if is_too_long(request, self.cache):
                    self.scheduler.enter_pool(request)
                else:
                    self.scheduler.move(request, self.cache.move_to_stream(request.seq))

    def _halt_background(self) -> None:
        """Abandon the background's batch, because its sequences must be touched."""
        if batch := self.background.halt():
            self._take_batch(batch)

    def _leave_background(self, request: Request, *, is_kept: bool = True) -> bool:
        """Whether a request's sequence may be touched now; if not, it comes back with the batch that others wait for,
        and is forgotten then unless what it holds `is_kept`."""
        if request.seq in self.cache.restoring or request.chunk_after(request.n_computed) is not None:
            request.skips_steps = False
        background = self.background
        if request not in background and not request.is_long:
            return True
        if background.is_for_nobody_but(request):
            self._halt_background()
        return background.drop(request, is_kept=is_kept)

    def _release(self, request: Request, *, is_kept: bool) -> None:
        """Give back a request's sequence. What it holds is kept, or not."""
        assert request.seq is not None
        if self._leave_background(request, is_kept=is_kept):
            self.cache.release(request.seq, request.n_computed if is_kept else 0)

    def _advance(self, grants: tuple[Grant, ...], *, is_reusable: bool = False, has_drafts: bool = False) -> None:
        """After a decode: count, tell the cache how far prompts are, and continue the answers of requests that caught
        up."""
        row, caught_up = -1, []
        for request, n_tokens, drafts in grants:
            row += n_tokens
            is_prefilling = not is_reusable and request.is_prefilling
            if request.chunks and (span := request.next_chunk):
                is_last = request.n_computed + n_tokens == span.end
                self._encodings.computed(span, n_tokens, is_last=is_last)
            if request.scoring is not None and request.is_scoring:
                self._answers.score(request, row - n_tokens + 1, n_tokens)
            request.n_computed += n_tokens
            request.was_aborted = False
            if 0 < request.isolated_until <= request.n_computed:
                self.scheduler.end_isolation(request)
            if is_prefilling:
                assert request.seq is not None
                self.cache.grow(request.seq, request.n_computed)
            if not is_reusable:  # in a steady step the tokens say it all
                self._report.delta(request)
            if request.n_computed == len(request.tokens) and (request.scoring is None or not self._reads_on(request)):
                caught_up.append(LogitsRow(request, row, drafts))
            row += len(drafts)
        if has_drafts:
            self._speculation.begin_step(answer.request for answer in caught_up)
        self.scheduler.charge_outputs(answer.request.client for answer in caught_up)
        for answer in caught_up:
            if not answer.request.max_output:
                self._end(answer.request, Finish.LENGTH, self._clock())
        for over in self._answers.extend([answer for answer in caught_up if answer.request.max_output]):
            if has_drafts:
                self._settle(over.request)
            self._end(*over)
        if has_drafts:
            for request, _, _ in caught_up:
                if request.id in self._requests:
                    self._settle(request)

    def _reads_on(self, request: Request) -> bool:
        """Whether there is more of a prompt whose scores are wanted; then its next part is known from now on."""
        n_more = request.read_on()
        if n_more:
            self.scheduler.policy.charge(request.client, n_prefill=n_more, n_output=0)
        return n_more > 0

    def _settle(self, request: Request) -> None:
        """After a step with drafts: count what it gave, and take wrong drafts off their cells."""
        assert request.seq is not None
        # One is counted already, and one more is still being drawn where that takes long.
        n_more = max(0, self._speculation.end_step(request) - 1 + request.skips_steps)
        self.scheduler.charge_outputs([request.client] * n_more)
        self.totals.decode_tokens += n_more
        request.n_computed = self.cache.take_off(request.seq, request.n_computed)
        self._report.delta(request)

    # --- endings -----------------------------------------------------------------------------------------------

    def _end(self, request: Request, finish: Finish, now_s: float, error: LocalrunError | None = None) -> None:
        """The request's last delta. Its computed tokens stay as a prefix, unless the step that made them failed."""
        self._report.ended(request, finish, now_s, error)
        if request.seq is not None:
            self._release(request, is_kept=error is None and not request.own_salt)
        self._answers.end(request)
        if request.chunks:
            self._encodings.drop(request)
        self._speculation.end(request)
        if request.adapters.adapters:
            self._adapters.drop(request)
        self.scheduler.end(request)
        del self._requests[request.id]

    def _preempt(self, request: Request) -> None:
        """Take a request off its slot. Its cells become a parked prefix, so its return costs a copy, not a prefill;
        but for a prompt whose scores are wanted, which is read anew."""
        self._release(request, is_kept=not request.is_scoring)
        if request.is_scoring:
            request.read_anew()
        self._speculation.drop(request)
        self.scheduler.preempt(request, self._clock())
        self._report.preempted(request)

    def _isolate(self, non_finite: dict[Request, int]) -> None:
        """A call, which was taken back, gave these requests logits that are not finite (`non_finite_requests`). One
        that was computed alone is to blame and ends, unless its cells may have been spoiled by an aborted batch. The
        others are computed alone, in new cells, until they are as far as they were.

        A NaN stays in a cell when its sequence is gone, and spoils the rows of other sequences, though it is masked for
        them: kernels multiply it by 0. So no other row may be computed in these cells. What they hold of other requests
        was computed before, and is restored from memory into the new cells.
        """
        for request in non_finite if not self._has_unseen_rows else ():
            if request.isolated_until:
                self._end(request, Finish.ERROR, self._clock(), non_finite_error(request))
        self._halt_background()
        for request in list(self.scheduler.running):
            self._preempt(request)
        for request, end in non_finite.items():
            # It may be what stood beside it, or a draft of its own: whoever is isolated twice stays alone.
            request.n_isolations += 1
            request.isolated_until = end if request.n_isolations == 1 else sys.maxsize
        self.cache.renew()
        self._has_unseen_rows = False

    def _note_failure(self, error: Exception) -> None:
        """After `MAX_FAILED_STEPS` in a row the process gives up, since only a new context can help."""
        self._n_failed_steps += 1
        if self._n_failed_steps >= MAX_FAILED_STEPS:
            raise error

    def _take_back(self, grants: tuple[Grant, ...], error: DecodeFailed | None) -> None:
        """Rewind every sequence to where it was before a step that was abandoned or failed. If the library refused the
        batch itself, its requests end; otherwise the step is tried again."""
        for request, _, _ in grants:
            assert request.seq is not None
            request.n_computed = self.cache.rewind(request.seq, request.n_computed)
        if error is None:
            return
        self._note_failure(error)
        if not error.is_fatal:
            for request, _, _ in grants:
                self._end(request, Finish.ERROR, self._clock(), EngineFailed(str(error)))
