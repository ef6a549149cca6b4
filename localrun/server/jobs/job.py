"""One generation, as the API modules see it: `async with runtime.job(ask) as job: await job.submit(...)`, then iterate.

Runs in the daemon's event loop. Entering loads the model or joins a running load; leaving gives the model back, and
cancels what is unfinished. All that is known of it is its record (`generation.py`): the link puts in a step's delta by
a plain call; the consumer is woken once, however many are there, and takes them without another task switch.

When its engine dies it goes on on another one: it gives the model back, borrows it anew, waits for its turn (`link.py`
says why) and sends the same message with what was said so far. The consumer sees a pause.

Invariants: a job ends exactly once; a consumer that falls too far behind is cancelled, so no slow client holds a slot;
every way out (end, error, cancel, engine death, disconnect) frees the lease; no token is delivered twice.

Does not: render prompts, format answers, or decide when a model is unloaded (supervisor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Collection, Hashable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from localrun import wire
from localrun.config import NOTHING_ASKED, LoadSettings
from localrun.errors import Cancelled, EngineDied, LocalrunError
from localrun.models.adapters import AdapterChoice
from localrun.server import notices
from localrun.server.engines.faults import DEATHS_TO_OPEN, WAY_OUT, Quarantine
from localrun.server.engines.resident import Lease, Lender, Link, Turn, Use
from localrun.server.jobs.generation import Generation
from localrun.snapshot import RequestState

if TYPE_CHECKING:
    from localrun.models.adapters import AdaptedModel
    from localrun.models.storage.model import Model

# So many engines in a row may die before a new token of a request, if nothing else can be the cause of the last one.
MAX_DEATHS = 2
MAX_RESUMPTIONS = 20
# A load that dies is tried again as often as the breaker lets it be.
MAX_LOADS = DEATHS_TO_OPEN

_log = logging.getLogger(__name__)

_FINISHED_STATES = {
    wire.Finish.STOP: RequestState.DONE,
    wire.Finish.LENGTH: RequestState.DONE,
    wire.Finish.CANCELLED: RequestState.CANCELLED,
    wire.Finish.ERROR: RequestState.FAILED,
}


class Asker(Protocol):
    """Who asks: a caller, or a request of one."""

    def may_use_model(self, name: str) -> bool: ...


class UsageMeter(Asker, Protocol):
    """Who is told what a request used: the caller whose key it came with."""

    def record_usage(self, record: Generation, *, counts_prompt: bool) -> None: ...


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Who wants what. `keep_alive_s` None leaves it as it is, negative is for ever, 0 unloads the model afterwards.
    `target_itl_s` None takes the setting, 0 is no limit. `deadline_s` counts from the job's arrival. `speculates` None
    takes the model's setting, and so does `draft` "", else the name of a draft model. `lora` are adapters besides those
    in the model's name. `use` is what the model is loaded for, and `load` how. `key` is the name of the API key that
    asks, empty for none; it is the client that fairness knows. `namespace` is whose prompts it shares, and `meter` is
    told what it used. `tier` says by which rule of a tier the model was chosen. `client_id` and `trace_id` are as in
    `RequestRow`; the record of each job is added to `records`."""

    model: str
    api: str
    client: str = ""
    lane: wire.Lane = wire.Lane.DEFAULT
    target_itl_s: float | None = None
    deadline_s: float | None = None
    keep_alive_s: float | None = None
    speculates: bool | None = None
    draft: str = ""
    lora: tuple[AdapterChoice, ...] = ()
    use: Use = Use.TEXT
    load: LoadSettings = NOTHING_ASKED
    key: str = ""
    namespace: bytes = b""
    meter: UsageMeter | None = None
    tier: str = ""
    client_id: str = ""
    trace_id: str = ""
    records: list[Generation] | None = None

    def may_use_model(self, name: str) -> bool:
        """Whether for who asks there is a model, or an adapter, of this name."""
        return self.meter is None or self.meter.may_use_model(name)


class Names(Protocol):
    """Who knows what names stand for: the targets."""

    async def adapted(self, ask: JobRequest) -> AdaptedModel: ...
    def check_one(self, who: Asker, name: str, *, draft: str = "") -> None: ...


class Observer(Protocol):
    """Who is told what happens to requests: the telemetry."""

    def tokens(self, record: Generation, n_tokens: int, seconds_each: float | None, now_s: float) -> None: ...
    def loaded(self, record: Generation) -> None: ...
    def resumed(self, record: Generation) -> None: ...
    def ended(self, record: Generation) -> None: ...
    def left(self, record: Generation) -> None: ...


class Recorder(Protocol):
    """Who is told that a record is about to become final, with what computed it, while anybody listens: see
    `metering/traffic.py`."""

    @property
    def listeners(self) -> Collection[object]: ...
    def ends(self, record: Generation, link: Link | None) -> None: ...


class Job:
    """See the module. Not reusable; at most one `submit`. Without `resumes` the death of its engine is its end. `media`
    are the decoded pictures and recordings of its prompt; what is on `held` is given back at its end. `ready` is what
    the first of its engines said of itself."""

    model: Model
    ready: wire.Ready

    def __init__(
        self,
        job_id: str,
        ask: JobRequest,
        *,
        names: Names,
        lender: Lender,
        observer: Observer,
        quarantine: Quarantine | None = None,
        resumes: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        self.id = job_id
        self.ask = ask
        self.arrived_at_s = time.monotonic()
        self.load_s = 0.0
        self.media: dict[str, wire.Media] = {}
        self.held = contextlib.ExitStack()
        self.record = Generation(
            job_id, ask.api, ask.client, ask.lane, ask.model, self.arrived_at_s,
            key=ask.key, tier=ask.tier, client_id=ask.client_id, trace_id=ask.trace_id,
        )  # fmt: skip
        if ask.records is not None:
            ask.records.append(self.record)
        self._counts_prompt = True
        self._names = names
        self._lender = lender
        self._observer = observer
        self._recorder = recorder
        self._quarantine = Quarantine() if quarantine is None else quarantine
        self._lease: Lease | None = None
        self._model = ask.model  # without adapters, once they are known
        self._adapted: AdaptedModel | None = None
        self._cancel_asked = asyncio.Event()
        self._wake: asyncio.Future[None] | None = None  # of the consumer that waits
        self._resumes = resumes
        self._is_with_engine = False
        self._shown = asyncio.Event()  # as the record has it, or it will show no more
        self._resuming: asyncio.Task[None] | None = None

    @property
    def link(self) -> Link | None:
        """The engine that it runs on; None while loading and after the end."""
        return None if self._lease is None else self._lease.link

    # --- a lease's life ------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Job:
        """Waits for the model. Raises what loading it raises, and Cancelled when the job is cancelled meanwhile."""
        try:
            lease = await self._acquire()
        except BaseException as error:
            self._end_by(error)
            self._observer.left(self.record)
            raise
        self._lease = lease
        self.model = lease.model
        self.load_s = lease.waited_s
        self.ready = lease.link.ready
        self.record.loaded(lease.model.name, lease.link.model)
        self._observer.loaded(self.record)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancels what is unfinished and gives the model back. Never waits."""
        self._cancel_in_engine()
        if self._resuming is not None:
            self._resuming.cancel()
        if error is not None:
            self._end_by(error)
        elif self.record.engine_request_id is None:
            self._end(RequestState.DONE)  # it was there to load the model, or to count
        else:
            self._end(RequestState.CANCELLED)
        self.record.forget_unread()
        self.held.close()
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self._observer.left(self.record)

    async def _acquire(self) -> Lease:
        ask = self.ask
        if ask.lora or "+" in ask.model:
            self._adapted = await self._names.adapted(ask)
            self._model, self.record.adapters = self._adapted.model.name, self._adapted.shown
        if not self._cancel_asked.is_set():
            lease = self._lender.lend(self._model, ask.keep_alive_s, ask.use, ask.load)
            if lease is not None:
                return lease
        acquiring = asyncio.ensure_future(self._lender.acquire(self._model, ask.keep_alive_s, ask.use, ask.load))
        try:
            if await self._is_done_before_a_cancel(acquiring):
                return acquiring.result()
        except asyncio.CancelledError:
            _abandon(acquiring)
            raise
        _abandon(acquiring)
        raise Cancelled("the request was cancelled while its model was loading")

    # --- towards the engine --------------------------------------------------------------------------------------

    async def count(self, segments: Sequence[wire.Segment]) -> tuple[int, ...]:
        """The token ids of a prompt, as `submit` would have them. Raises EngineDied, and what the engine refuses."""
        return (await self.tokenize(segments)).tokens

    async def tokenize(
        self, segments: Sequence[wire.Segment], *, is_prompt: bool = True, wants_pieces: bool = False
    ) -> wire.Counted:
        """The tokens of a text, and what each stands for. Raises as `count`."""
        n_deaths = n_kills = 0
        asked = wire.Count(id=0, segments=tuple(segments), is_prompt=is_prompt, wants_pieces=wants_pieces)
        self._check_is_harmless(asked)
        while True:
            link = self._leased().link
            try:
                return await link.count(tuple(segments), is_prompt=is_prompt, wants_pieces=wants_pieces)
            except EngineDied as error:
                n_kills += link.was_killed
                n_deaths += not link.was_killed
                if n_deaths >= MAX_DEATHS:
                    self._quarantine.put(self._kind(), asked, self.id)
                if not self._resumes or n_deaths >= MAX_DEATHS or n_kills > MAX_RESUMPTIONS:
                    raise
                await self._borrow_again(error)

    async def text_of(self, tokens: Sequence[int]) -> str:
        """What token ids stand for. Raises as `count`."""
        told = await self.tokenize([wire.Segment("", tokens=tuple(tokens))], is_prompt=False, wants_pieces=True)
        return b"".join(told.pieces).decode("utf-8", errors="replace")

    async def submit(
        self,
        asked: wire.Submit,
        *,
        segments: Sequence[wire.Segment] = (),
        tokens: Sequence[int] | None = None,
        choice: int = 0,
    ) -> None:
        """Sends `asked` to the engine with this prompt, as answer number `choice` to it: with one seed for all, all
        would be the same. What the engine refuses is raised by the iteration. Raises EngineDied, and what is wrong with
        the draft model that was asked for, or of memory for the adapters."""
        speculates, draft_path = await self._leased().speculation(self.ask.speculates, self.ask.draft)
        adapters = None if self._adapted is None else await self._leased().adapters(self._adapted)
        link = await self._ready_to_send()
        if link is None:
            return
        now_s = time.monotonic()
        sampling = asked.sampling
        self._counts_prompt = choice == 0
        self.record.asked = msgspec.structs.replace(asked, grammar=None, prediction="")  # which may be long
        if sampling.seed is None:  # another engine could not know what this one draws
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
        elif choice:
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + choice)
        message = msgspec.structs.replace(
            asked,
            id=link.next_id(),
            segments=tuple(segments),
            tokens=None if tokens is None else tuple(tokens),
            sampling=sampling,
            client=self.ask.key or self.ask.client,
            lane=self.ask.lane,
            target_itl_s=self.ask.target_itl_s,
            deadline_s=self._deadline_left_s(now_s),
            arrived_at_s=now_s,
            speculates=speculates,
            draft_model_path=draft_path,
            adapters=adapters,
            namespace=self.ask.namespace,
        )
        self._check_is_harmless(message)
        self.record.ask(message)
        self._send(link, message)

    async def embed(
        self,
        inputs: Sequence[str | tuple[int, ...] | wire.Mixed],
        *,
        query: str | None = None,
        truncate: bool = False,
        dimensions: int = 0,
    ) -> None:
        """Sends inputs that become vectors of `dimensions` numbers (all of them if 0), or with `query` scores. What the
        engine refuses is raised by the iteration. Raises EngineDied."""
        link = await self._ready_to_send()
        if link is None:
            return
        now_s = time.monotonic()
        message = wire.Embed(
            id=link.next_id(),
            inputs=tuple(inputs),
            query=query,
            truncate=truncate,
            dimensions=dimensions,
            client=self.ask.key or self.ask.client,
            lane=self.ask.lane,
            deadline_s=self._deadline_left_s(now_s),
            arrived_at_s=now_s,
        )
        self._check_is_harmless(message)
        self.record.ask(message)
        self._send(link, message)

    def request_cancel(self) -> None:
        """Somebody else wants it to end (DELETE). The consumer gets the CANCELLED delta; while loading, Cancelled."""
        self._cancel_asked.set()
        self._cancel_in_engine()
        if self._resuming is not None and not self._is_with_engine and not self.record.is_ended:
            self._resuming.cancel()
            self._take_cancelled()

    # --- from the engine (the link calls these) ------------------------------------------------------------------

    def on_started(self, started: wire.Started) -> None:
        self.record.started(started)

    def on_delta(self, delta: wire.Delta, sent_at_s: float) -> None:
        record = self.record
        if record.is_ended:
            return
        seconds_each = record.progress(delta, sent_at_s)
        if delta.tokens:
            self._observer.tokens(record, len(delta.tokens), seconds_each, sent_at_s)
        if record.has_shown:
            self._shown.set()
        if delta.finish is not None:
            self._take_final(delta, sent_at_s)
        elif not record.is_behind:
            self._give(delta)
        else:
            self._cancel_in_engine()
            record.forget_unread()
            self._fail(Cancelled("the client reads its answer too slowly; the request was cancelled"))

    def on_engine_gone(self, error: LocalrunError, *, is_blamed: bool, is_alone: bool) -> bool:
        """The engine will say nothing more. What it said before is still delivered. `is_blamed`: it may have died of
        this request; `is_alone`: of no other. Whether it goes on on another engine, or was over before."""
        self._is_with_engine = False
        self._shown.set()
        if self.record.is_ended:
            return True
        self.record.n_deaths += is_blamed
        if self._cancel_asked.is_set():
            self._take_cancelled()
        elif not self._resumes or not isinstance(error, EngineDied):
            self._fail(error)
        elif is_alone and is_blamed and self.record.n_deaths >= MAX_DEATHS:
            assert self.record.message is not None
            self._quarantine.put(self._kind(), self.record.message, self.id)
            self._fail(_deadly(self.id, error, self.record.n_deaths))
        elif self.record.resumed >= MAX_RESUMPTIONS:
            self._fail(
                EngineDied(f"{MAX_RESUMPTIONS} engines died under request '{self.id}'; at last: {error.message}")
            )
        else:
            self.record.state = RequestState.LOADING
            self._resuming = asyncio.create_task(self._resume(error))
            return True
        return False

    # --- towards the consumer ------------------------------------------------------------------------------------

    def __aiter__(self) -> Job:
        return self

    async def __anext__(self) -> wire.Delta:
        """The next delta, the final one included. Raises what the engine refused with, EngineDied, or Cancelled for a
        consumer that was too slow."""
        while (delta := self.record.read()) is None:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if delta.notices:
            notices.note(*delta.notices)
        return delta

    @property
    def has_ready(self) -> bool:
        """True when the next iteration gives a delta without waiting, so that several can be sent as one."""
        return self.record.has_unread

    # --- inside --------------------------------------------------------------------------------------------------

    async def _ready_to_send(self) -> Link | None:
        """The engine, once it takes a message; None when the job was cancelled before."""
        if self.record.engine_request_id is not None:
            raise RuntimeError("a job is submitted once")
        link = self._leased().link
        await link.writable()
        if link.turn.locked():
            passing = asyncio.ensure_future(_pass(link.turn))
            try:
                await self._is_done_before_a_cancel(passing)
            finally:
                passing.cancel()
        if not self._cancel_asked.is_set():
            return link
        self._take_cancelled()
        return None

    async def _is_done_before_a_cancel(self, work: asyncio.Future[Any]) -> bool:
        cancelling = asyncio.ensure_future(self._cancel_asked.wait())
        try:
            await asyncio.wait({work, cancelling}, return_when=asyncio.FIRST_COMPLETED)
            return not self._cancel_asked.is_set()
        finally:
            cancelling.cancel()

    def _send(self, link: Link, message: wire.Submit | wire.Embed) -> None:
        self.record.sent(message.id)
        self._shown.clear()
        try:
            link.submit(message, self)
            self._is_with_engine = True
        except EngineDied as error:  # since the model was borrowed
            self.on_engine_gone(error, is_blamed=False, is_alone=False)

    # --- on another engine ---------------------------------------------------------------------------------------

    async def _resume(self, error: LocalrunError) -> None:
        """Goes on where the dead engine was, and ends when the new one has shown that it can, or has died as well."""
        began_at_s = time.monotonic()
        try:
            while True:
                link = await self._borrow_again(error)
                await link.writable()
                async with link.turn:
                    if link.error is not None:  # it died before the turn came
                        continue
                    self.record.resume()
                    self._observer.resumed(self.record)
                    _log.warning(
                        "request %s resumes after %d tokens and %.2f s: %s", self.id, self.record.n_output,
                        time.monotonic() - began_at_s, error.message.partition("; the next")[0],
                    )  # fmt: skip
                    self._send(link, self.record.rest(link.next_id()))
                    if self.record.has_begun:
                        await self._shown.wait()
                    return
        except Exception as failed:  # whatever it is, the consumer waits
            if not self.record.is_ended:
                self._fail(failed)

    async def _borrow_again(self, error: LocalrunError) -> Link:
        """The link of another engine with the same model. Raises what loading it raises, and EngineDied if its files
        have changed."""
        old = self._leased()
        old.release()
        n_loads = 0
        while self._lease is old:
            n_loads += 1
            try:
                self._lease = await self._lender.acquire(
                    self._model, self.ask.keep_alive_s, self.ask.use, old.load, is_resumed=True
                )
            except EngineDied:
                if n_loads == MAX_LOADS:
                    raise
        lease = self._leased()
        if lease.identity != old.identity:
            raise EngineDied(f"{error.message}; its file has changed since, so the answer cannot go on")
        self.record.engine = lease.link.model
        return lease.link

    def _deadline_left_s(self, now_s: float) -> float | None:
        return None if self.ask.deadline_s is None else self.ask.deadline_s - (now_s - self.arrived_at_s)

    def _check_is_harmless(self, message: wire.Submit | wire.Embed | wire.Count) -> None:
        """Raises EngineDied for one like another that engines died of."""
        if self._quarantine.held:
            self._quarantine.check(self._kind(), message)

    def _kind(self) -> Hashable:
        """Whose request it is, and of which model: what a quarantine is for."""
        return self.ask.key, self._leased().identity

    def _leased(self) -> Lease:
        if self._lease is None:
            raise RuntimeError("a job is used inside `async with`")
        return self._lease

    def _cancel_in_engine(self) -> None:
        request_id = self.record.engine_request_id
        if request_id is not None and self._is_with_engine and not self.record.is_ended and self._lease is not None:
            self._lease.link.cancel(request_id)

    def _take_final(self, delta: wire.Delta, now_s: float) -> None:
        assert delta.finish is not None
        self.record.usage = delta.usage
        reason = None if delta.finish is wire.Finish.ERROR else delta.finish.value
        code = delta.error_code or "" if reason is None else ""
        self._end(
            _FINISHED_STATES[delta.finish], now_s, finish_reason=reason, error=delta.error_message, error_code=code
        )
        self._give(delta)

    def _take_cancelled(self) -> None:
        """It was cancelled while it was with no engine."""
        now_s = time.monotonic()
        self._take_final(self.record.cancelled(now_s), now_s)

    def _fail(self, error: Exception) -> None:
        self._end_by(error)
        self.record.fail(error)
        self._wake_consumer()

    def _give(self, delta: wire.Delta) -> None:
        self.record.keep(delta)
        self._wake_consumer()

    def _wake_consumer(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _end_by(self, error: BaseException) -> None:
        """A client that went away shows as CancelledError or OSError: that is a cancel, not a failure."""
        if isinstance(error, Cancelled):
            self._end(RequestState.CANCELLED, error=error.message)
        elif isinstance(error, OSError) or not isinstance(error, Exception):
            self._end(RequestState.CANCELLED)
        else:
            message = error.message if isinstance(error, LocalrunError) else f"{type(error).__name__}: {error}"
            code = error.code if isinstance(error, LocalrunError) else LocalrunError.code
            self._end(RequestState.FAILED, error=message, error_code=code)

    def _end(
        self,
        state: RequestState,
        now_s: float | None = None,
        *,
        finish_reason: str | None = None,
        error: str | None = None,
        error_code: str = "",
    ) -> None:
        if self.record.is_ended:
            return
        if state is RequestState.CANCELLED:
            finish_reason = wire.Finish.CANCELLED.value
        if self._recorder is not None and self._recorder.listeners:
            self._recorder.ends(self.record, self.link)
        self.record.end(
            state, now_s or time.monotonic(), finish_reason=finish_reason, error=error, error_code=error_code
        )
        if self.ask.meter is not None:
            self.ask.meter.record_usage(self.record, counts_prompt=self._counts_prompt)
        self._observer.ended(self.record)


async def _pass(turn: Turn) -> None:
    async with turn:
        pass


def _deadly(request_id: str, error: LocalrunError, n_deaths: int) -> EngineDied:
    how = error.message.partition("; the next")[0]
    return EngineDied(
        f"{n_deaths} engines in a row died of request '{request_id}', so it is not given to another one: {how}. "
        f"{WAY_OUT}"
    )


def _abandon(acquiring: asyncio.Future[Lease]) -> None:
    """Nobody waits for this lease any more; one that arrives all the same goes straight back."""

    def give_back(done: asyncio.Future[Lease]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().release()

    acquiring.cancel()
    acquiring.add_done_callback(give_back)
