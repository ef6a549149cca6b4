"""What is known of one generation: what was asked, what came, and how far it is; and numbers over a stretch of time, of
one generation or of many: tokens per second, and percentiles of durations.

Pure: time is an argument. Memory is bounded whatever the load, and adding a duration costs one logarithm at most.
Does not: know a job or an engine, or wait for anything (`job.py` does); export to Prometheus (telemetry.py does, with
fixed buckets that can be summed over machines).
"""

from __future__ import annotations

import itertools
import math
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import msgspec

from localrun import wire
from localrun.errors import by_code
from localrun.snapshot import DraftRow, Percentiles, RequestRow, RequestState

# Why an answer that is tool calls stopped, in OpenAI's words.
CALLED = "tool_calls"
# Deltas, and characters of them, that are kept for a client that does not read.
MAX_UNREAD = 4096
MAX_UNREAD_CHARS = 8 * 1024 * 1024

_STATES = {
    wire.Phase.QUEUED: RequestState.QUEUED,
    wire.Phase.PREFILL: RequestState.PREFILL,
    wire.Phase.DECODE: RequestState.DECODE,
}


def new_id() -> str:
    """An id that no request of this machine had before."""
    return f"req_{uuid.uuid4().hex}"


@dataclass(eq=False, repr=False)
class Generation:
    """One request: its state, its counts and its times; what the client has not read yet; and, until its end, what
    another engine needs to go on with it.

    Owner: the job, which feeds it from arrival to end; the registry and the telemetry read it.

    Invariants: the state only becomes final once, and no count or time changes after that; `n_output` counts tokens
    that the engine sampled, whether or not their text was already sent on. Token times are when the engine sent them:
    several quick steps may be read from the pipe at once, which must not look like a fast model. `n_drafted` and
    `n_accepted` count all engines that it ran on, though each counts from 0; `drafts` are the last one's, by their
    source. Memory is bounded by the request, the context (a number for each token) and what a client may leave unread.

    `model` is the name asked for until the model is found, then its own name; `engine` is the name that its engine was
    loaded under, which is another one where names share files, empty before there is one. `key` is the name of the API
    key that it came with, empty for none. `number` counts the daemon's requests; `asked` is what it asked of the
    engine, without its prompt. `node` is the cluster's that computes it, empty where this machine does. `has_shown`
    says that its present engine gave it something new, and `n_deaths` how many may have died of it since one did.
    """

    id: str
    api: str
    client: str
    lane: wire.Lane
    model: str
    arrived_at_s: float
    _: KW_ONLY
    key: str = ""
    tier: str = ""
    client_id: str = ""
    trace_id: str = ""
    number: int = field(default_factory=itertools.count(1).__next__)
    state: RequestState = RequestState.LOADING
    engine: str = ""
    asked: wire.Submit | None = None
    engine_request_id: int | None = None
    adapters: tuple[str, ...] = ()
    node: str = ""
    slot: int | None = None
    last_slot: int | None = None
    started_at_s: float | None = None
    n_prompt: int | None = None
    n_cached: int | None = None
    n_computed: int = 0
    n_output: int = 0
    has_new_line: bool = False
    usage: wire.Usage | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    ended_at_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    error_code: str = ""
    resumed: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    drafts: tuple[wire.DraftCounts, ...] = ()
    speedup: float | None = None
    has_shown: bool = False
    n_deaths: int = 0
    # What was asked of the first engine and the tokens so far, for the next one; nothing after the end. Vectors are
    # numbered as the inputs were first asked for.
    message: wire.Submit | wire.Embed | None = None
    output: list[int] = field(default_factory=list)
    _drafted_before: tuple[int, int] = (0, 0)
    _n_first: int = 0
    _rate: RateWindow = field(default_factory=lambda: RateWindow())
    _gaps: LatencyHistogram = field(default_factory=lambda: LatencyHistogram())
    _mu: float | None = None
    _vectors_of: Sequence[int] = ()  # the inputs that were asked for last
    _done: dict[int, int] = field(default_factory=dict)  # inputs with a vector, and their tokens
    _unread: deque[wire.Delta] = field(default_factory=deque)
    _n_unread_chars: int = 0
    _failure: Exception | None = None
    _is_read: bool = False

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

    @property
    def has_begun(self) -> bool:
        """Whether it got a slot, on any engine."""
        return self.started_at_s is not None

    @property
    def is_on_trial(self) -> bool:
        """Whether an engine died under it and this one has not shown yet that it can go on."""
        return self.resumed > 0 and self.has_begun and not self.has_shown

    def loaded(self, model: str, engine: str) -> None:
        """The model is there; the request is not with the engine yet."""
        self.model = model
        self.engine = engine
        self.state = RequestState.QUEUED

    def ask(self, message: wire.Submit | wire.Embed) -> None:
        """What the first engine is asked."""
        self.message = message
        if isinstance(message, wire.Embed):
            self._vectors_of = range(len(message.inputs))

    def sent(self, engine_request_id: int) -> None:
        """An engine was asked."""
        self.engine_request_id = engine_request_id
        self.has_shown = False

    def resume(self) -> None:
        """Its engine died, and another one goes on."""
        self.resumed += 1
        self._drafted_before = (self.n_drafted, self.n_accepted)
        self.slot, self.node = None, ""
        self.state = RequestState.QUEUED

    def started(self, started: wire.Started) -> None:
        """It got a slot; the first time counts. That is known even of one that ended: its engine may die of it yet."""
        if self.started_at_s is None:
            self.started_at_s = started.at_s
        if self.is_ended:
            return
        self.slot = self.last_slot = started.slot
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
        if delta.tokens or delta.vectors or delta.finish is not None:
            self.has_shown, self.n_deaths = True, 0
        if delta.vectors:
            delta.vectors = [self._numbered(vector) for vector in delta.vectors]
        if not delta.tokens:
            return None
        self.output += delta.tokens
        self._mu = delta.mu
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
        self.message, self.output = None, []

    # --- what is not read yet ------------------------------------------------------------------------------------

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    @property
    def is_behind(self) -> bool:
        """Whether the client is too far behind to be kept more for."""
        return len(self._unread) >= MAX_UNREAD or self._n_unread_chars >= MAX_UNREAD_CHARS

    def keep(self, delta: wire.Delta) -> None:
        self._unread.append(delta)
        self._n_unread_chars += len(delta.text)

    def fail(self, error: Exception) -> None:
        """After what is kept, `read` raises this."""
        self._failure = error

    def forget_unread(self) -> None:
        self._unread.clear()
        self._n_unread_chars = 0

    def read(self) -> wire.Delta | None:
        """The next delta, the final one included; None if it has not come yet.

        Raises what a final delta reports as an error, what `fail` was given, and StopAsyncIteration after the end.
        """
        if not self._unread:
            if self._failure is not None:
                raise self._failure
            if self._is_read:
                raise StopAsyncIteration
            return None
        delta = self._unread.popleft()
        self._n_unread_chars -= len(delta.text)
        if delta.finish is not None:
            self._is_read = True
            if delta.finish is wire.Finish.ERROR:
                message = delta.error_message or "the engine gave no reason"
                raise by_code(delta.error_code or "", message, retry_after_s=delta.retry_after_s)
        return delta

    # --- for the next engine -------------------------------------------------------------------------------------

    def rest(self, request_id: int) -> wire.Submit | wire.Embed:
        """The original request with the tokens generated so far, for the next engine."""
        message = self.message
        assert message is not None
        resume = wire.Resume(
            output=tuple(self.output),
            n_cached=sum(self._done.values()) if isinstance(message, wire.Embed) else self.n_cached or 0,
            started_at_s=self.started_at_s,
            first_token_at_s=self.first_token_at_s,
            last_token_at_s=self.last_token_at_s,
            mu=self._mu,
        )
        if isinstance(message, wire.Submit):
            return msgspec.structs.replace(message, id=request_id, resume=resume)
        self._vectors_of = [index for index in range(len(message.inputs)) if index not in self._done]
        left = tuple(message.inputs[index] for index in self._vectors_of)
        return msgspec.structs.replace(message, id=request_id, inputs=left, resume=resume)

    def cancelled(self, now_s: float) -> wire.Delta:
        """The end of one that was cancelled while it was with no engine."""
        asked_s = now_s if self.message is None else self.message.arrived_at_s
        started_s = now_s if self.started_at_s is None else self.started_at_s
        first_s = now_s if self.first_token_at_s is None else self.first_token_at_s
        usage = wire.Usage(
            n_prompt=self.n_prompt or 0,
            n_cached=self.n_cached or 0,
            n_output=self.n_output,
            queued_s=max(0.0, started_s - asked_s),
            prefill_s=max(0.0, first_s - started_s),
            decode_s=max(0.0, (self.last_token_at_s or first_s) - first_s),
        )
        return wire.Delta(
            id=0, phase=wire.Phase.DONE, n_computed=0, n_output=self.n_output, finish=wire.Finish.CANCELLED, usage=usage
        )

    # --- shown ---------------------------------------------------------------------------------------------------

    def row(
        self, now_s: float, *, queue_position: int | None = None, predicted_wait_s: float | None = None
    ) -> RequestRow:
        """The row that people see. `queue_position` 1 is next."""
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
            node=self.node,
            lane=self.lane.value,
            state=self.state,
            slot=self.slot,
            queue_position=queue_position,
            predicted_wait_s=predicted_wait_s,
            prompt_tokens=self.n_prompt,
            computed_tokens=min(self.n_computed, self.n_prompt or 0),
            cached_tokens=self.n_cached,
            output_tokens=self.n_output,
            tokens_per_s=self.tokens_per_s(now_s),
            tokens_per_s_avg=self._average_per_s(),
            ttft_s=self.ttft_s,
            itl_p50_s=self._gaps.quantiles(0.5)[0],
            age_s=(now_s if self.ended_at_s is None else self.ended_at_s) - self.arrived_at_s,
            finish_reason=self.finish_reason,
            error=self.error,
            resumed=self.resumed,
            drafted_tokens=self.n_drafted,
            accepted_tokens=self.n_accepted,
            drafts=[
                DraftRow(
                    source=one.source.value,
                    drafts=one.n_drafts,
                    drafted_tokens=one.n_drafted,
                    accepted_tokens=one.n_accepted,
                    seconds=one.seconds,
                )
                for one in self.drafts
            ],
            speedup=self.speedup,
        )

    def tokens_per_s(self, now_s: float) -> float | None:
        """Of the last second; None unless it decodes, and before its second token."""
        is_decoding = self.state is RequestState.DECODE and self._gaps.count > 0
        return self._rate.per_s(now_s) if is_decoding else None

    def _count_drafts(self, n_drafted: int, n_accepted: int) -> None:
        """By the engine that it runs on. One that says nothing of them, as in some ends, takes nothing back."""
        n_drafted_before, n_accepted_before = self._drafted_before
        self.n_drafted = max(self.n_drafted, n_drafted_before + n_drafted)
        self.n_accepted = max(self.n_accepted, n_accepted_before + n_accepted)

    def _numbered(self, vector: wire.Vector) -> wire.Vector:
        index = self._vectors_of[vector.index]
        self._done[index] = vector.n_tokens
        return msgspec.structs.replace(vector, index=index)

    def _average_per_s(self) -> float | None:
        """Output tokens after the first ones, over the time from those to the last."""
        if self.first_token_at_s is None or self.last_token_at_s is None:
            return None
        elapsed_s = self.last_token_at_s - self.first_token_at_s
        return (self.n_output - self._n_first) / elapsed_s if elapsed_s > 0 else None


RATE_WINDOW_S = 1.0


class RateWindow:
    """Tokens per second over the last second, of one engine and kind of work, or of one request.

    Tokens arrive in steps, and a step may be a millisecond or ten seconds long. Counting what fell into the last second
    would show a slow model as 0, 4, 0, 4. So every entry knows the time it took, and the rate is that of the entries
    that ended in the last second, over the time they cover; between two slow steps, the last one still speaks.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[float, float, int]] = deque()  # (ended, span, tokens), oldest first
        self._n_tokens = 0

    def add(self, now_s: float, span_s: float, n_tokens: int) -> None:
        """`n_tokens` came at `now_s`; making them took `span_s`, the time since the ones before."""
        self._entries.append((now_s, span_s, n_tokens))
        self._n_tokens += n_tokens
        self._forget(now_s)

    def per_s(self, now_s: float) -> float:
        """Tokens per second. 0 when nothing came for a second and for twice the time that the last entry took."""
        self._forget(now_s)
        if not self._entries:
            return 0.0
        ended_s, span_s, n_tokens = self._entries[-1]
        idle_s = now_s - ended_s
        if idle_s > RATE_WINDOW_S:
            return n_tokens / max(span_s, idle_s) if idle_s <= 2 * span_s else 0.0
        oldest_ended_s, oldest_span_s, _ = self._entries[0]
        began_s = oldest_ended_s - oldest_span_s
        covered_s = ended_s - began_s
        if idle_s > 2 * span_s:
            # Something is overdue: one quick step in an otherwise idle second is not a high rate.
            covered_s = max(covered_s, min(RATE_WINDOW_S, now_s - began_s))
        return self._n_tokens / covered_s if covered_s > 0 else 0.0

    def _forget(self, now_s: float) -> None:
        entries = self._entries
        while len(entries) > 1 and entries[0][0] <= now_s - RATE_WINDOW_S:
            self._n_tokens -= entries.popleft()[2]


GROWTH = 1.04
LATENCY_WINDOW_S = 60.0
SLICE_S = 1.0

_SHORTEST_S = 1e-6
_LONGEST_S = 1e5
_PER_LOG = 1 / math.log(GROWTH)


def _bucket(seconds: float) -> int:
    return math.floor(math.log(min(max(seconds, _SHORTEST_S), _LONGEST_S)) * _PER_LOG)


class LatencyHistogram:
    """Percentiles of all durations that were added.

    They fall into buckets whose bounds grow by `GROWTH`, so a percentile is right to half of that (2 %). Only buckets
    in use take memory (at most about 650).
    """

    __slots__ = ("count", "counts")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.count = 0

    def add(self, seconds: float, times: int = 1) -> None:
        bucket = _bucket(seconds)
        self.counts[bucket] = self.counts.get(bucket, 0) + times
        self.count += times

    def remove(self, other: LatencyHistogram) -> None:
        """Takes back what was added, bucket by bucket."""
        for bucket, times in other.counts.items():
            left = self.counts[bucket] - times
            if left:
                self.counts[bucket] = left
            else:
                del self.counts[bucket]
        self.count -= other.count

    def quantiles(self, *fractions: float) -> list[float | None]:
        """Seconds at each fraction (ascending, 0 to 1); None without a sample. Nearest rank."""
        found: list[float | None] = []
        ordered = iter(sorted(self.counts.items()))
        bucket, seen = 0, 0
        for fraction in fractions:
            if not self.count:
                found.append(None)
                continue
            rank = max(1, math.ceil(fraction * self.count))
            while seen < rank:
                bucket, times = next(ordered)
                seen += times
            found.append(float(GROWTH ** (bucket + 0.5)))  # the bucket's middle
        return found


class LatencyWindow:
    """The durations of the last `WINDOW_S` seconds, forgotten in slices of `SLICE_S`."""

    def __init__(self) -> None:
        self._all = LatencyHistogram()
        self._slices: deque[tuple[int, LatencyHistogram]] = deque()

    def add(self, now_s: float, seconds: float, times: int = 1) -> None:
        """Times that go back a little (two engines' news) fall into the newest slice."""
        number = int(now_s / SLICE_S)
        if not self._slices or number > self._slices[-1][0]:
            self._forget(now_s)
            self._slices.append((number, LatencyHistogram()))
        self._slices[-1][1].add(seconds, times)
        self._all.add(seconds, times)

    def percentiles(self, now_s: float) -> Percentiles:
        self._forget(now_s)
        p50, p95, p99 = self._all.quantiles(0.5, 0.95, 0.99)
        return Percentiles(p50=p50, p95=p95, p99=p99, count=self._all.count)

    def _forget(self, now_s: float) -> None:
        oldest = int((now_s - LATENCY_WINDOW_S) / SLICE_S)
        while self._slices and self._slices[0][0] <= oldest:
            self._all.remove(self._slices.popleft()[1])
