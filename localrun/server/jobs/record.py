"""What is known of each request, while it lasts and afterwards; and what another engine needs to go on with it.

Pure. Does not: know a job or an engine, or hold the text, which the client has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from localrun import wire
from localrun.server.jobs.windows import LatencyHistogram, RateWindow
from localrun.snapshot import DraftRow, RequestRow, RequestState

# Why an answer that is tool calls stopped, in OpenAI's words.
CALLED = "tool_calls"
_NUMBERS = itertools.count(1)
_STATES = {
    wire.Phase.QUEUED: RequestState.QUEUED,
    wire.Phase.PREFILL: RequestState.PREFILL,
    wire.Phase.DECODE: RequestState.DECODE,
}


class RequestRecord:
    """What is known of one request: its state, its counts and its times.

    Time is an argument. Owner: the job, which feeds it from arrival to end; the registry and the telemetry read
    it.

    Invariants: the state only becomes final once, and nothing changes after that; `n_output` counts tokens that the
    engine sampled, whether or not their text was already sent on. Token times are when the engine sent them: several
    quick steps may be read from the pipe at once, which must not look like a fast model. `n_drafted` and `n_accepted`
    count all engines that it ran on, though each counts from 0; `drafts` are the last one's, by their source.

    Does not: talk to the engine, or hold the text.

    `model` is the name asked for until the model is found, then its own name; `engine` is the name that its engine was
    loaded under, which is another one where names share files, empty before there is one. `key` is the name of the API
    key that it came with, empty for none. `number` counts the daemon's requests; `asked` is what it asked of the
    engine, without its prompt.
    """

    def __init__(
        self, request_id: str, api: str, client: str, lane: wire.Lane, model: str, arrived_at_s: float, *, key: str = ""
    ) -> None:
        self.id = request_id
        self.number = next(_NUMBERS)
        self.key = key
        self.api = api
        self.client = client
        self.lane = lane
        self.model = model
        self.arrived_at_s = arrived_at_s
        self.state = RequestState.LOADING
        self.engine = ""
        self.asked: wire.Submit | None = None
        self.engine_request_id: int | None = None
        self.adapters: tuple[str, ...] = ()
        self.tier = ""
        self.client_id = self.trace_id = ""
        self.slot: int | None = None
        self.last_slot: int | None = None
        self.started_at_s: float | None = None
        self.n_prompt: int | None = None
        self.n_cached: int | None = None
        self.n_computed = 0
        self.n_output = 0
        self.has_new_line = False
        self.usage: wire.Usage | None = None
        self.first_token_at_s: float | None = None
        self.last_token_at_s: float | None = None
        self.ended_at_s: float | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.error_code = ""
        self.resumed = 0
        self.n_drafted = 0
        self.n_accepted = 0
        self.drafts: tuple[wire.DraftCounts, ...] = ()
        self.speedup: float | None = None
        self._drafted_before = (0, 0)
        self._n_first = 0
        self._rate = RateWindow()
        self._gaps = LatencyHistogram()

    @property
    def is_ended(self) -> bool:
        return self.ended_at_s is not None

    @property
    def ttft_s(self) -> float | None:
        """From arrival, loading and queueing included, to the first token."""
        return None if self.first_token_at_s is None else self.first_token_at_s - self.arrived_at_s

    @property
    def was_loaded(self) -> bool:
        return bool(self.engine)

    def loaded(self, model: str, engine: str) -> None:
        """The model is there; the request is not with the engine yet."""
        self.model = model
        self.engine = engine
        self.state = RequestState.QUEUED

    def resume(self) -> None:
        """Its engine died, and another one goes on."""
        self.resumed += 1
        self._drafted_before = (self.n_drafted, self.n_accepted)
        self.slot = None
        self.state = RequestState.QUEUED

    def started(self, started: wire.Started) -> None:
        self.slot = self.last_slot = started.slot
        if self.started_at_s is None:
            self.started_at_s = started.at_s
        self.n_prompt = started.n_prompt
        self.n_cached = started.n_cached
        self.n_computed = max(self.n_computed, started.n_cached)
        self.state = RequestState.PREFILL

    def progress(self, delta: wire.Delta, now_s: float) -> float | None:
        """Takes a delta in. Returns the seconds per token since the last ones; None without any, and for the first."""
        self.n_computed = delta.n_computed
        self.n_output = delta.n_output
        if delta.n_drafted:
            self._count_drafts(delta.n_drafted, delta.n_accepted)
        if not self.has_new_line and "\n" in delta.text:
            self.has_new_line = True
        if delta.finish is None:
            self.state = _STATES.get(delta.phase, self.state)
            if delta.phase is wire.Phase.QUEUED:  # it gave its slot up and waits again
                self.slot = None
        if not delta.tokens:
            return None
        n_tokens, last_s = len(delta.tokens), self.last_token_at_s
        self.last_token_at_s = now_s
        if last_s is None:
            self.first_token_at_s = now_s
            self._n_first = n_tokens
            return None
        gap_s = now_s - last_s
        self._rate.add(now_s, gap_s, n_tokens)
        self._gaps.add(gap_s / n_tokens, n_tokens)
        return gap_s / n_tokens

    def called(self) -> None:
        """The answer turned out to be tool calls, which is why it stopped."""
        if self.finish_reason == wire.Finish.STOP.value:
            self.finish_reason = CALLED

    def end(
        self,
        state: RequestState,
        now_s: float,
        *,
        finish_reason: str | None = None,
        error: str | None = None,
        error_code: str = "",
    ) -> None:
        """The one final change of state."""
        self.state = state
        self.ended_at_s = now_s
        self.slot = None
        self.finish_reason = finish_reason
        self.error = error
        self.error_code = error_code
        if self.usage is not None:
            self.n_prompt = self.usage.n_prompt
            self.n_cached = self.usage.n_cached
            self.n_output = self.usage.n_output
            self.drafts = drafts = self.usage.drafts
            self.speedup = self.usage.speedup if drafts else None
            self._count_drafts(sum(one.n_drafted for one in drafts), sum(one.n_accepted for one in drafts))

    def row(
        self, now_s: float, *, queue_position: int | None = None, predicted_wait_s: float | None = None
    ) -> RequestRow:
        """The row that people see. `queue_position` 1 is next."""
        is_decoding = self.state is RequestState.DECODE and self._gaps.count > 0
        return RequestRow(
            id=self.id,
            client=self.client,
            key=self.key,
            api=self.api,
            model=self.model,
            adapters=list(self.adapters),
            tier=self.tier,
            client_id=self.client_id,
            trace_id=self.trace_id,
            lane=self.lane.value,
            state=self.state,
            slot=self.slot,
            queue_position=queue_position,
            predicted_wait_s=predicted_wait_s,
            prompt_tokens=self.n_prompt,
            computed_tokens=min(self.n_computed, self.n_prompt or 0),
            cached_tokens=self.n_cached,
            output_tokens=self.n_output,
            tokens_per_s=self._rate.per_s(now_s) if is_decoding else None,
            tokens_per_s_avg=self._average_per_s(),
            ttft_s=self.ttft_s,
            itl_p50_s=self._gaps.quantiles(0.5)[0],
            age_s=(now_s if self.ended_at_s is None else self.ended_at_s) - self.arrived_at_s,
            finish_reason=self.finish_reason,
            error=self.error,
            resumed=self.resumed,
            drafted_tokens=self.n_drafted,
            accepted_tokens=self.n_accepted,
            drafts=[_draft_row(counts) for counts in self.drafts],
            speedup=self.speedup,
        )

    def _count_drafts(self, n_drafted: int, n_accepted: int) -> None:
        """By the engine that it runs on. One that says nothing of them, as in some ends, takes nothing back."""
        n_drafted_before, n_accepted_before = self._drafted_before
        self.n_drafted = max(self.n_drafted, n_drafted_before + n_drafted)
        self.n_accepted = max(self.n_accepted, n_accepted_before + n_accepted)

    def _average_per_s(self) -> float | None:
        """Output tokens after the first ones, over the time from those to the last."""
        if self.first_token_at_s is None or self.last_token_at_s is None:
            return None
        elapsed_s = self.last_token_at_s - self.first_token_at_s
        return (self.n_output - self._n_first) / elapsed_s if elapsed_s > 0 else None


def _draft_row(counts: wire.DraftCounts) -> DraftRow:
    return DraftRow(
        source=counts.source.value,
        drafts=counts.n_drafts,
        drafted_tokens=counts.n_drafted,
        accepted_tokens=counts.n_accepted,
        seconds=counts.seconds,
    )


class Transcript:
    """What was asked of an engine, and what it answered so far: all that another engine needs to go on. `record` is the
    request's.

    Owner: the job, from `ask` to its end. Bounded by the request and the context: a number for each token.
    """

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._message: wire.Submit | wire.Embed | None = None
        self._output: list[int] = []
        self._mu: float | None = None
        self._started_at_s: float | None = None
        self._vectors_of: Sequence[int] = ()  # the inputs that were asked for last
        self._done: dict[int, int] = {}  # inputs with a vector, and their tokens

    @property
    def has_begun(self) -> bool:
        """Whether it got a slot, on any engine."""
        return self._started_at_s is not None

    @property
    def message(self) -> wire.Submit | wire.Embed:
        """What was asked of the first engine."""
        assert self._message is not None
        return self._message

    @property
    def n_output(self) -> int:
        return len(self._output)

    def ask(self, message: wire.Submit | wire.Embed) -> None:
        """The first message, to the first engine."""
        self._message = message
        if isinstance(message, wire.Embed):
            self._vectors_of = range(len(message.inputs))

    def start(self, started: wire.Started) -> None:
        """It got a slot; the first time counts."""
        if self._started_at_s is None:
            self._started_at_s = started.at_s

    def take(self, delta: wire.Delta) -> None:
        """Takes an answer in, and numbers its vectors as the inputs were first asked for."""
        if delta.tokens:
            self._output += delta.tokens
            self._mu = delta.mu
        if delta.vectors:
            delta.vectors = [self._numbered(vector) for vector in delta.vectors]

    def rest(self, request_id: int) -> wire.Submit | wire.Embed:
        """The original request with the tokens generated so far, for the next engine."""
        message, record = self._message, self._record
        assert message is not None
        resume = wire.Resume(
            output=tuple(self._output),
            n_cached=sum(self._done.values()) if isinstance(message, wire.Embed) else record.n_cached or 0,
            started_at_s=self._started_at_s,
            first_token_at_s=record.first_token_at_s,
            last_token_at_s=record.last_token_at_s,
            mu=self._mu,
        )
        if isinstance(message, wire.Submit):
            return msgspec.structs.replace(message, id=request_id, resume=resume)
        self._vectors_of = [index for index in range(len(message.inputs)) if index not in self._done]
        left = tuple(message.inputs[index] for index in self._vectors_of)
        return msgspec.structs.replace(message, id=request_id, inputs=left, resume=resume)

    def cancelled(self, now_s: float) -> wire.Delta:
        """The end of one that was cancelled while it was with no engine."""
        record, message = self._record, self._message
        if message is None:
            usage = wire.Usage(n_prompt=0, n_cached=0, n_output=0, queued_s=0.0, prefill_s=0.0, decode_s=0.0)
        else:
            started = self._started_at_s if self._started_at_s is not None else now_s
            first = record.first_token_at_s if record.first_token_at_s is not None else now_s
            usage = wire.Usage(
                n_prompt=record.n_prompt or 0,
                n_cached=record.n_cached or 0,
                n_output=record.n_output,
                queued_s=max(0.0, started - message.arrived_at_s),
                prefill_s=max(0.0, first - started),
                decode_s=max(0.0, (record.last_token_at_s or first) - first),
            )
        return wire.Delta(
            id=0,
            phase=wire.Phase.DONE,
            n_computed=0,
            n_output=record.n_output,
            finish=wire.Finish.CANCELLED,
            usage=usage,
        )

    def _numbered(self, vector: wire.Vector) -> wire.Vector:
        index = self._vectors_of[vector.index]
        self._done[index] = vector.n_tokens
        return msgspec.structs.replace(vector, index=index)
