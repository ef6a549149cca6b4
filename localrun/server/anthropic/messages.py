"""POST /v1/messages, and /v1/messages/count_tokens.

The conversation goes through the model's chat template, and what the model writes through the parser of its format. A
conversation longer than the context is refused with both numbers; nothing is cut silently. Counting says how long the
prompt of a message would be, by the model's own tokenizer; it loads the model, as its message would, and generates
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from localrun.errors import ContextExceeded
from localrun.server import streaming
from localrun.server.anthropic.body import CountBody, MessagesBody
from localrun.server.anthropic.output import MESSAGE_STOP, PING, Fields, Output, encode, event
from localrun.server.http.exchange import Exchange, apart
from localrun.server.jobs.job import Job
from localrun.server.parsing.pieces import Reply, ended
from localrun.server.prompting.ask import ChatRequest
from localrun.server.prompting.conversation import begun
from localrun.server.prompting.prepare import Prepared, prepare
from localrun.server.routing import RoutingInput
from localrun.server.runtime import Runtime
from localrun.wire import Delta, Finish, Usage

# The prompt's length, and that of the context.
_NUMBERS = 2


@contextmanager
def naming() -> Iterator[None]:
    """A prompt that is too long says so as Anthropic does: agents look for these words, and then shorten their
    conversation by themselves."""
    try:
        yield
    except ContextExceeded as error:
        numbers = re.findall(r"\d+", error.message)
        if len(numbers) >= _NUMBERS:
            error.message = f"prompt is too long: {numbers[0]} tokens > {numbers[1]} maximum; {error.message}"
        raise


async def prepared_of(runtime: Runtime, job: Job, ask: ChatRequest) -> Prepared:
    """The prompt. Raises what `prepare` raises."""
    ask = msgspec.structs.replace(ask, messages=begun(job.model, ask.messages))
    with naming():
        return await prepare(runtime, job, ask)


async def count_tokens(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(CountBody)
    ask = await apart(body.ask)
    question = RoutingInput(ask=ask, effort=body.effort, may_probe=False)
    async with streaming.entered(runtime, exchange, body, question) as (_, ask, [job]):
        prepared = await prepared_of(runtime, job, ask)
        tokens = await job.count(prepared.segments)
        await exchange.answer_json(CountedTokens(input_tokens=len(tokens)))


async def create(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(MessagesBody)
    body.check_supported()
    ask = await apart(body.ask)
    question = RoutingInput(ask=ask, effort=body.effort)
    async with streaming.entered(runtime, exchange, body, question) as (body, ask, [job]):
        prepared = await prepared_of(runtime, job, ask)
        plan = await streaming.plan(body, job, max_output=body.max_tokens, prepared=prepared, stop=body.stops)
        await job.submit(plan, segments=prepared.segments)
        message = _Message(exchange, job, body, Reply(prepared.new_parser()))
        with naming():
            await (message.stream() if body.stream else message.whole())


class _Message:
    """One answer, sent once."""

    def __init__(self, exchange: Exchange, job: Job, body: MessagesBody, reply: Reply) -> None:
        self._exchange = exchange
        self._job = job
        self._body = body
        self._reply = reply
        self._output = Output(omits_thinking=body.omits_thinking)
        self._headers = [(b"x-localrun-request", job.id.encode("ascii"))]

    async def stream(self) -> None:
        """Sends all of it. Raises what the job's iteration raises."""
        await streaming.stream(self._exchange, [self._job], self, self._headers)

    def begin(self) -> bytes:
        return event("message_start", {"message": self._begun()}) + PING

    def take(self, _: int, delta: Delta) -> bytes:
        update = self._take(delta)
        return update if delta.finish is None else update + self._last(delta)

    def end(self) -> bytes:
        return MESSAGE_STOP

    async def whole(self) -> None:
        """Sends all of it at once. Raises what the job's iteration raises, and Cancelled."""
        async for delta in self._job:
            self._take(delta)
            if delta.finish is None:
                continue
            ending, usage = self._ended(delta)
            answer = self._begun() | {"content": self._output.blocks(), **ending, "usage": usage}
            await self._exchange.answer(encode(answer), headers=self._headers)

    def _take(self, delta: Delta) -> bytes:
        told = self._output.take(self._reply.take(delta))
        return told if delta.finish is None else told + self._output.finish()

    def _begun(self) -> Fields:
        record = self._job.record
        n_prompt, n_cached = record.n_prompt or 0, record.n_cached or 0
        return {
            "id": "msg_" + self._job.id.removeprefix("req_"),
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counts(n_prompt, n_cached, 0, 0),
        }

    def _last(self, delta: Delta) -> bytes:
        ending, usage = self._ended(delta)
        return event("message_delta", {"delta": ending, "usage": usage})

    def _ended(self, delta: Delta) -> tuple[Fields, AnthropicUsage]:
        """Why it ended, and what it used. Raises Cancelled: any other reason would be a lie."""
        finish, used = ended(delta)
        is_own_stop = delta.stop_text is not None and delta.stop_text in self._body.stops
        ending = {
            "stop_reason": self._stop_reason(finish, used, is_own_stop=is_own_stop),
            "stop_sequence": delta.stop_text if is_own_stop else None,
        }
        return ending, counts(used.n_prompt, used.n_cached, used.n_output, self._reply.n_thinking)

    def _stop_reason(self, finish: Finish, used: Usage, *, is_own_stop: bool) -> str:
        if finish is Finish.LENGTH:
            return "max_tokens" if used.n_output >= self._body.max_tokens else "model_context_window_exceeded"
        if is_own_stop:
            return "stop_sequence"
        if not self._output.has_calls:
            return "end_turn"
        self._job.record.called()
        return "tool_use"


class AnthropicUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. The prompt is `input_tokens` and `cache_read_input_tokens` together; the latter were not computed."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


class CountedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How long the prompt would be."""

    input_tokens: int


def counts(n_prompt: int, n_cached: int, n_output: int, n_thinking: int) -> AnthropicUsage:
    """The prompt's tokens are those that were read from the cache, and the others."""
    return AnthropicUsage(
        input_tokens=n_prompt - n_cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=n_cached,
        output_tokens=n_output,
        output_tokens_details={"thinking_tokens": min(n_thinking, n_output)},
    )
