"""From submitted jobs to OpenAI's answer, streamed or whole, for chat and completions alike.

Runs in the task of the request. A stream's SSE chunks are written once per token, so a chunk is put together from bytes
made once per answer and the encoded text. Within one answer the id, the time and the model never change.

In chat a choice's first chunk has the role. A call begins with a chunk of its id and name, and its arguments follow in
pieces, as OpenAI streams them; thinking comes as `reasoning_content`, as DeepSeek and llama-server name it, and as
`reasoning`, as Ollama and vLLM do.
`functions`, the older form, gets its one call as `function_call`.
What a stream tells while it runs, where a request asks for it as llama-server's clients do (how much of the prompt is
computed, the timings so far), is added by a writer around that of the route (`Running`): a stream that is not asked for
any of it pays nothing.
Does not: make prompts (`chat.py`, `completions.py`), or parse what the model wrote. The chunks of completions are in
`completions.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from localrun.errors import ContextExceeded
from localrun.server import streaming
from localrun.server.engines.machine import build_name
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.jobs.generation import Generation
from localrun.server.jobs.job import Job
from localrun.server.openai.bodies import RunningFields
from localrun.server.parsing.pieces import Call, CallArguments, CallStart, Content, Reply, Thinking, ended
from localrun.wire import ChosenLogprob, Delta, DraftSource, Finish, TokenLogprob, Usage

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode

Fields = dict[str, Any]


class Chunks(ABC):
    """One answer, with a reply for each choice. Chunks but the last have no `usage`: OpenAI has a null there, for which
    some clients skip a chunk."""

    id_prefix: ClassVar[str]
    stream_object: ClassVar[str]
    whole_object: ClassVar[str]
    before_text: ClassVar[bytes]
    after_text: ClassVar[bytes]
    no_text: ClassVar[bytes]

    def __init__(self, *, request_id: str, model: str, replies: Sequence[Reply]) -> None:
        self._replies = replies
        self._envelope: Fields = {
            "id": self.id_prefix + request_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": build_name(),
        }
        envelope = encode({"object": self.stream_object} | self._envelope)
        self._head = b"data: " + envelope[:-1] + b',"choices":[{"index":'
        self._tail = b"}\n\n"
        self._after_text = self.after_text + b',"logprobs":null,"finish_reason":null}]' + self._tail

    # --- a stream ------------------------------------------------------------------------------------------------

    def text(self, index: int, text: str, logprobs: Sequence[ChosenLogprob] | None = None) -> bytes:
        start = self._head + b"%d," % index + self.before_text + encode(text)
        if not logprobs:
            return start + self._after_text
        more = b',"logprobs":' + encode(self.logprobs(index, logprobs)) + b',"finish_reason":null}]'
        return start + self.after_text + more + self._tail

    def end(self, index: int, reason: str | None, fields: Fields) -> bytes:
        """Why one choice ended; None for one that goes on. `fields` go beside `choices`."""
        choice = b'%d,%b,"logprobs":null,"finish_reason":%b}]' % (index, self.no_text, encode(reason))
        more = b"," + encode(fields)[1:-1] if fields else b""
        return self._head + choice + more + self._tail

    def last(self, fields: Fields) -> bytes:
        """The chunk without choices that carries the usage."""
        return b"data: " + encode({"object": self.stream_object} | self._envelope | {"choices": []} | fields) + b"\n\n"

    @abstractmethod
    def first(self, index: int) -> bytes:
        """What precedes a choice's text; may be empty."""

    @abstractmethod
    def update(self, index: int, delta: Delta) -> bytes:
        """The chunks of one delta; may be empty. Not its end."""

    # --- a whole answer ------------------------------------------------------------------------------------------

    def whole(self, choices: list[Fields], fields: Fields) -> bytes:
        return encode({"object": self.whole_object} | self._envelope | {"choices": choices} | fields)

    def gather(self, index: int, delta: Delta) -> None:
        """Keeps one delta for `choice`."""
        self._replies[index].gather(delta)

    @abstractmethod
    def choice(self, index: int, reason: str) -> Fields:
        """One finished choice of `whole`."""

    # --- both ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def logprobs(self, index: int, logprobs: Sequence[ChosenLogprob]) -> Fields:
        """Log-probabilities of one choice's next tokens, in the route's own form."""

    def reason(self, index: int, finish: Finish) -> str:
        """Why a choice ended, in OpenAI's words."""
        return Finish.LENGTH.value if finish is Finish.LENGTH else Finish.STOP.value

    @property
    def n_thinking(self) -> int:
        """How many tokens of all choices were thinking."""
        return sum(reply.n_thinking for reply in self._replies)


def entry(token: ChosenLogprob | TokenLogprob) -> Fields:
    """One token of chat's log-probabilities. `bytes` is there because half a character has no text."""
    return {"token": piece_text(token.piece), "logprob": token.logprob, "bytes": list(token.piece)}


def entries(logprobs: Sequence[ChosenLogprob]) -> list[Fields]:
    return [entry(chosen) | {"top_logprobs": [entry(other) for other in chosen.top]} for chosen in logprobs]


def piece_text(piece: bytes) -> str:
    """A token's text, as far as it has one."""
    return piece.decode("utf-8", errors="replace")


class ChatChunks(Chunks):
    """Content, thinking and tool calls, each as a delta of its own."""

    id_prefix = "chatcmpl-"
    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    before_text = b'"delta":{"content":'
    after_text = b"}"
    no_text = b'"delta":{}'

    def __init__(self, *, request_id: str, model: str, replies: Sequence[Reply], uses_functions: bool = False) -> None:
        super().__init__(request_id=request_id, model=model, replies=replies)
        self._uses_functions = uses_functions

    def first(self, index: int) -> bytes:
        """Without content, as the last one: an empty text is a beginning to some clients, and null stops others that
        join texts."""
        return self._head + b'%d,"delta":{"role":"assistant"' % index + self._after_text

    def update(self, index: int, delta: Delta) -> bytes:
        """Log-probabilities stand with the first content, or alone where there is none, as for a call."""
        logprobs = delta.logprobs
        chunks: list[bytes] = []
        for piece in self._replies[index].take(delta):
            if isinstance(piece, Content):
                chunks.append(self.text(index, piece.text, logprobs))
                logprobs = None
            else:
                chunks.append(self._other(index, piece))
        if logprobs:
            chunks.append(self.text(index, "", logprobs))
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def choice(self, index: int, reason: str) -> Fields:
        said = self._replies[index].gathered
        content = said.content_text
        message: Fields = {"role": "assistant", "content": content, "refusal": None}
        if said.thinking:
            message["reasoning_content"] = message["reasoning"] = said.thinking_text
        if said.calls:
            message["content"] = content or None
            if self._uses_functions:
                message["function_call"] = _function(said.calls[0])
            else:
                message["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": _function(call)} for call in said.calls
                ]
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(index, said.logprobs) if said.logprobs else None,
            "finish_reason": reason,
        }

    def logprobs(self, index: int, logprobs: Sequence[ChosenLogprob]) -> Fields:
        return {"content": entries(logprobs), "refusal": None}

    def reason(self, index: int, finish: Finish) -> str:
        if finish is Finish.STOP and self._replies[index].n_calls:
            return "function_call" if self._uses_functions else "tool_calls"
        return super().reason(index, finish)

    def _other(self, index: int, piece: Thinking | CallStart | CallArguments) -> bytes:
        if isinstance(piece, Thinking):
            delta: Fields = {"reasoning_content": piece.text, "reasoning": piece.text}
        elif self._uses_functions and piece.index > 0:
            return b""  # the older form has room for one call
        else:
            named: Fields = {}
            if isinstance(piece, CallStart):
                named, function = {"id": piece.id, "type": "function"}, {"name": piece.name, "arguments": ""}
            else:
                function = {"arguments": piece.text}
            call = {"index": piece.index, **named, "function": function}
            delta = {"function_call": function} if self._uses_functions else {"tool_calls": [call]}
        return self._head + b'%d,"delta":%b' % (index, encode(delta)[:-1]) + self._after_text


def _function(call: Call) -> Fields:
    return {"name": call.name, "arguments": call.arguments_text}


@contextmanager
def naming(name: str) -> Iterator[None]:
    """A prompt that is too long is told of as the field `name`."""
    try:
        yield
    except ContextExceeded as error:
        error.field = name
        raise


class PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`cached_tokens` of the prompt were not computed again."""

    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning_tokens` of the output were thinking, and `accepted_prediction_tokens` came from the client's
    `prediction`. `rejected_prediction_tokens` of it were verified in vain, and are no part of the output."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class OpenAIUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: OutputDetails


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds and rates of one answer, as llama-server names them. The last two are absent where nothing was
    drafted."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


def usage_of(prompts: Sequence[Usage], choices: Sequence[Usage], *, n_thinking: int = 0) -> OpenAIUsage:
    """`prompts` has one entry per prompt, `choices` one per answer: a prompt with several answers counts once.
    `n_thinking` of the answers' tokens were thinking."""
    predicted = [counts for one in choices for counts in one.drafts if counts.source is DraftSource.PREDICTION]
    n_prompt = sum(one.n_prompt for one in prompts)
    n_output = sum(one.n_output for one in choices)
    return OpenAIUsage(
        prompt_tokens=n_prompt,
        completion_tokens=n_output,
        total_tokens=n_prompt + n_output,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(one.n_cached for one in prompts)),
        completion_tokens_details=OutputDetails(
            reasoning_tokens=n_thinking,
            accepted_prediction_tokens=sum(counts.n_accepted for counts in predicted),
            rejected_prediction_tokens=sum(counts.n_drafted - counts.n_accepted for counts in predicted),
        ),
    )


def timings_of(one: Usage, *, n_drafted: int = 0, n_accepted: int = 0) -> Timings:
    """Milliseconds and rates of one answer. `prompt_n` counts what was computed, `cache_n` what was not."""
    n_computed = one.n_prompt - one.n_cached
    return Timings(
        cache_n=one.n_cached,
        prompt_n=n_computed,
        prompt_ms=one.prefill_s * 1000,
        prompt_per_token_ms=_each_ms(n_computed, one.prefill_s),
        prompt_per_second=_rate(n_computed, one.prefill_s),
        predicted_n=one.n_output,
        predicted_ms=one.decode_s * 1000,
        # The time runs from the first token to the last, so it is that of all but one.
        predicted_per_token_ms=_each_ms(one.n_output - 1, one.decode_s),
        predicted_per_second=_rate(one.n_output - 1, one.decode_s),
        draft_n=n_drafted or UNSET,
        draft_n_accepted=n_accepted if n_drafted else UNSET,
    )


def _each_ms(n_tokens: int, seconds: float) -> float:
    """0 of none: clients read a number."""
    return seconds * 1000 / n_tokens if n_tokens > 0 else 0.0


def _rate(n_tokens: int, seconds: float) -> float:
    return n_tokens / seconds if seconds > 0 and n_tokens > 0 else 0.0


@dataclass
class Answer:
    """One answer with a choice per job; `n_per_prompt` jobs in a row have the same prompt, which came as the body's
    `prompt_field`. `told` stands beside the counts at the end."""

    exchange: Exchange
    jobs: Sequence[Job]
    chunks: Chunks
    n_per_prompt: int = field(kw_only=True)
    include_usage: bool = field(kw_only=True)
    prompt_field: str = field(kw_only=True)
    told: Fields = field(kw_only=True, default_factory=dict)
    usages: dict[int, Usage] = field(init=False, default_factory=dict)

    async def send(self, *, stream: bool, wanted: RunningFields | None = None) -> None:
        """Sends all of it, a stream with what is `wanted` while it runs. Raises what the jobs' iteration raises."""
        if stream:
            writer: streaming.Writer = self
            if wanted is not None and (wanted.return_progress or wanted.timings_per_token):
                writer = Running(self, self.jobs, wanted, lambda index, more: self.chunks.end(index, None, more))
            with naming(self.prompt_field):
                await streaming.stream(self.exchange, self.jobs, writer, headers_of(self.jobs))
        else:
            reasons = await self.gather()
            await self.send_choices([self.chunks.choice(index, reason) for index, reason in enumerate(reasons)])

    async def gather(self) -> list[str]:
        """Waits for all choices, which the chunks keep. Why each of them ended. Raises what the iteration raises."""
        reasons = [""] * len(self.jobs)
        with naming(self.prompt_field):
            async with aclosing(streaming.deltas(self.jobs)) as deltas:
                async for index, delta, _ in deltas:
                    self.chunks.gather(index, delta)
                    if delta.finish is not None:
                        reasons[index] = self.finished(index, delta)
        return reasons

    async def send_choices(self, finished: list[Fields]) -> None:
        await self.exchange.answer(self.chunks.whole(finished, self._counts()), headers=headers_of(self.jobs))

    # --- as the writer of a stream -------------------------------------------------------------------------------

    def begin(self) -> bytes:
        """All choices begin at once and in order: OpenAI's own client takes the first chunk for choice 0."""
        return b"".join(self.chunks.first(index) for index in range(len(self.jobs)))

    def take(self, index: int, delta: Delta) -> bytes:
        update = self.chunks.update(index, delta)
        if delta.finish is None:
            return update
        reason = self.finished(index, delta)
        # With a usage chunk to come, the timings are there.
        return update + self.chunks.end(index, reason, {} if self.include_usage else self.more())

    def end(self) -> bytes:
        return self.chunks.last(self._counts()) + DONE if self.include_usage else DONE

    # --- inside --------------------------------------------------------------------------------------------------

    def finished(self, index: int, delta: Delta) -> str:
        finish, self.usages[index] = ended(delta)
        reason = self.chunks.reason(index, finish)
        if reason not in (Finish.STOP.value, Finish.LENGTH.value):
            self.jobs[index].record.called()
        return reason

    def _counts(self) -> Fields:
        by_index = [self.usages[index] for index in range(len(self.jobs))]
        counts = usage_of(by_index[:: self.n_per_prompt], by_index, n_thinking=self.chunks.n_thinking)
        return {"usage": counts} | self.more()

    def more(self) -> Fields:
        """What it has besides `usage`. Timings of several answers at once would mean nothing."""
        if len(self.jobs) > 1:
            return self.told
        record = self.jobs[0].record
        timings = timings_of(self.usages[0], n_drafted=record.n_drafted, n_accepted=record.n_accepted)
        return self.told | {"timings": timings}


def headers_of(jobs: Sequence[Job]) -> Headers:
    return [(b"x-localrun-request", ", ".join(job.id for job in jobs).encode("ascii"))]


class PromptProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Of a prompt's `total` tokens so many are `processed` by now, among them those that the cache had. `time_ms` runs
    from the first step."""

    total: int
    cache: int
    processed: int
    time_ms: int


class Running:
    """A writer around a route's. `chunk` makes one that has no text, and the fields that it is given, for an answer.
    With `times_chunks` the writer's chunks get the timings, with `times_end` the stream's last event as well."""

    def __init__(
        self,
        writer: streaming.Writer,
        jobs: Sequence[Job],
        wanted: RunningFields,
        chunk: Callable[[int, Fields], bytes],
        *,
        times_chunks: bool = True,
        times_end: bool = False,
    ) -> None:
        self._writer = writer
        self._records = [job.record for job in jobs]
        self._shows_timings = bool(wanted.timings_per_token)
        self._times_chunks = times_chunks and self._shows_timings
        self._chunk = chunk
        self._times_end = times_end and self._shows_timings
        # Tokens of each prompt that were told of, as long as there is more to tell.
        self._told: dict[int, int] = dict.fromkeys(range(len(jobs)), -1) if wanted.return_progress else {}

    def begin(self) -> bytes:
        return self._writer.begin()

    def take(self, index: int, delta: Delta) -> bytes:
        progress = self._progress(index, delta) if index in self._told else b""
        update = self._writer.take(index, delta)
        if update and self._times_chunks and delta.finish is None:
            update = with_fields(update, {"timings": timings_so_far(self._records[index], delta.n_output)})
        return progress + update

    def end(self) -> bytes:
        end, usage = self._writer.end(), self._records[0].usage
        return with_fields(end, {"timings": timings_of(usage)}) if self._times_end and usage is not None else end

    def _progress(self, index: int, delta: Delta) -> bytes:
        """From what the cache had to all of it, each step once."""
        record = self._records[index]
        total, n_cached = record.n_prompt, record.n_cached or 0
        if total is None:
            return b""
        is_whole = bool(delta.tokens) or delta.finish is not None
        now = [n_cached] if self._told[index] < 0 else []
        now.append(total if is_whole else min(delta.n_computed, total))
        chunks = []
        for n_processed in now:
            if n_processed <= self._told[index]:
                continue
            timings = timings_so_far(record, 0, n_processed)
            told = PromptProgress(total=total, cache=n_cached, processed=n_processed, time_ms=round(timings.prompt_ms))
            self._told[index] = n_processed
            more: Fields = {"timings": timings} if self._shows_timings else {}
            chunks.append(self._chunk(index, {"prompt_progress": told} | more))
        if is_whole:
            del self._told[index]
        return b"".join(chunks)


def timings_so_far(record: Generation, n_output: int, n_processed: int | None = None) -> Timings:
    """As at the end, of an answer that has so many tokens, or whose prompt is computed up to there."""
    n_cached, started_s = record.n_cached or 0, record.started_at_s
    first_s, last_s = record.first_token_at_s, record.last_token_at_s
    n_prompt = (record.n_prompt or 0) if n_processed is None else n_processed
    prefill_s = decode_s = 0.0
    if started_s is not None and n_prompt > n_cached:
        prefill_s = max(0.0, (time.monotonic() if first_s is None else first_s) - started_s)
    if n_output and first_s is not None and last_s is not None:
        decode_s = last_s - first_s
    usage = Usage(
        n_prompt=n_prompt, n_cached=n_cached, n_output=n_output, queued_s=0.0, prefill_s=prefill_s, decode_s=decode_s
    )
    return timings_of(usage, n_drafted=record.n_drafted, n_accepted=record.n_accepted)


_END = b"}\n\n"


def with_fields(events: bytes, fields: Fields) -> bytes:
    """The last of these events with more fields."""
    assert events.endswith(_END)
    return events[: -len(_END)] + b"," + encode(fields)[1:-1] + _END
