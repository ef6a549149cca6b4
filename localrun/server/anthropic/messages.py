"""POST /v1/messages, and /v1/messages/count_tokens; a reply's pieces as blocks of content, and the SSE events that tell
of them while they come.

The conversation goes through the model's chat template, and what the model writes through the parser of its format. A
conversation longer than the context is refused with both numbers; nothing is cut silently. Counting says how long the
prompt of a message would be, by the model's own tokenizer; it loads the model, as its message would, and generates
nothing.

Runs in the task of the request. Events are written once per token, so what stays the same within one block is encoded
once (`Deltas`). Invariants: blocks are opened in order, one at a time, each closed before the next; what the events add
up to is what the blocks hold.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from localrun.errors import ContextExceeded
from localrun.server import streaming
from localrun.server.anthropic.body import CountBody, MessagesBody
from localrun.server.http.exchange import Exchange, apart
from localrun.server.jobs.job import Job
from localrun.server.openai.answer import Fields, encode, headers_of
from localrun.server.parsing.pieces import CallStart, Content, Piece, Reply, Thinking, ended, whole_arguments
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
        output = Output(omits_thinking=body.omits_thinking)
        message = _Message(exchange, job, body, Reply(prepared.new_parser()), output)
        with naming():
            if body.stream:
                await streaming.stream(exchange, [job], message, headers_of([job]))
            else:
                await message.whole()


@dataclass
class _Message:
    """One answer, sent once."""

    exchange: Exchange
    job: Job
    body: MessagesBody
    reply: Reply
    output: Output

    def begin(self) -> bytes:
        return event("message_start", {"message": self._begun()}) + PING

    def take(self, _: int, delta: Delta) -> bytes:
        told = self._take(delta)
        if delta.finish is None:
            return told
        ending, usage = self._ended(delta)
        return told + event("message_delta", {"delta": ending, "usage": usage})

    def end(self) -> bytes:
        return MESSAGE_STOP

    async def whole(self) -> None:
        """Sends all of it at once. Raises what the job's iteration raises, and Cancelled."""
        async for delta in self.job:
            self._take(delta)
            if delta.finish is None:
                continue
            ending, usage = self._ended(delta)
            answer = self._begun() | {"content": self.output.blocks(), **ending, "usage": usage}
            await self.exchange.answer(encode(answer), headers=headers_of([self.job]))

    def _take(self, delta: Delta) -> bytes:
        told = self.output.take(self.reply.take(delta))
        return told if delta.finish is None else told + self.output.finish()

    def _begun(self) -> Fields:
        record = self.job.record
        n_prompt, n_cached = record.n_prompt or 0, record.n_cached or 0
        return {
            "id": "msg_" + streaming.answer_id([self.job]),
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counts(n_prompt, n_cached, 0, 0),
        }

    def _ended(self, delta: Delta) -> tuple[Fields, AnthropicUsage]:
        """Why it ended, and what it used. Raises Cancelled: any other reason would be a lie."""
        finish, used = ended(delta)
        is_own_stop = delta.stop_text is not None and delta.stop_text in self.body.stops
        ending = {
            "stop_reason": self._stop_reason(finish, used, is_own_stop=is_own_stop),
            "stop_sequence": delta.stop_text if is_own_stop else None,
        }
        return ending, counts(used.n_prompt, used.n_cached, used.n_output, self.reply.n_thinking)

    def _stop_reason(self, finish: Finish, used: Usage, *, is_own_stop: bool) -> str:
        if finish is Finish.LENGTH:
            return "max_tokens" if used.n_output >= self.body.max_tokens else "model_context_window_exceeded"
        if is_own_stop:
            return "stop_sequence"
        if not self.reply.n_calls:
            return "end_turn"
        self.job.record.called()
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


def event(kind: str, fields: Fields | None = None) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode("ascii"), encode({"type": kind} | (fields or {})))


PING = event("ping")
MESSAGE_STOP = event("message_stop")


class Deltas:
    """Events that add text to one block: `key` is the field that has it, in a delta of type `kind`."""

    def __init__(self, index: int, kind: str, key: str) -> None:
        whole = event("content_block_delta", {"index": index, "delta": {"type": kind, key: ""}})
        # Up to the opening quote of the empty text, and from its closing one on.
        self._before, self._after = whole[: -len(b'""}}\n\n')], b"}}\n\n"

    def add(self, text: str) -> bytes:
        return self._before + encode(text) + self._after


_KINDS: dict[type, str] = {Content: "text", Thinking: "thinking"}
_EMPTY: dict[str, Fields] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class Output:
    """One message's content. With `omits_thinking` thinking has a block without its text."""

    def __init__(self, *, omits_thinking: bool = False) -> None:
        self._omits_thinking = omits_thinking
        self._blocks: list[Fields] = []
        self._texts: list[list[str]] = []
        self._is_open = False
        self._deltas: Deltas

    def take(self, pieces: Sequence[Piece]) -> bytes:
        told: list[bytes] = []
        for piece in pieces:
            if isinstance(piece, CallStart):
                call_id = "toolu_" + piece.id.removeprefix("call_")
                block = {"type": "tool_use", "id": call_id, "name": piece.name, "input": {}}
                told.append(self._open(block, "input_json_delta", "partial_json"))
                continue
            kind = _KINDS.get(type(piece))
            if kind is not None and not self._is_in(kind):
                told.append(self._open(_EMPTY[kind], f"{kind}_delta", kind))
            told.append(self._more(piece.text))
        return b"".join(told)

    def finish(self) -> bytes:
        """The block that is open ends. Returns its last events."""
        if not self._is_open:
            return b""
        self._is_open = False
        index = len(self._blocks) - 1
        stop = event("content_block_stop", {"index": index})
        if self._blocks[-1]["type"] != "thinking":
            return stop
        delta = {"type": "signature_delta", "signature": signature("".join(self._texts[-1]))}
        return event("content_block_delta", {"index": index, "delta": delta}) + stop

    def blocks(self) -> list[Fields]:
        """All of the content, once it has ended. A call that the limit cut off is left out: nobody can make it."""
        made = (self._whole(block, "".join(texts)) for block, texts in zip(self._blocks, self._texts, strict=True))
        return [block for block in made if block is not None]

    def _is_in(self, kind: str) -> bool:
        return self._is_open and self._blocks[-1]["type"] == kind

    def _open(self, block: Fields, delta: str, key: str) -> bytes:
        closed = self.finish()
        index = len(self._blocks)
        self._blocks.append(block)
        self._texts.append([])
        self._is_open, self._deltas = True, Deltas(index, delta, key)
        return closed + event("content_block_start", {"index": index, "content_block": block})

    def _more(self, text: str) -> bytes:
        self._texts[-1].append(text)
        if self._omits_thinking and self._is_in("thinking"):
            return b""
        return self._deltas.add(text)

    def _whole(self, block: Fields, text: str) -> Fields | None:
        if block["type"] == "text":
            return block | {"text": text}
        if block["type"] == "thinking":
            return block | {"thinking": "" if self._omits_thinking else text, "signature": signature(text)}
        arguments = whole_arguments(text)
        return None if arguments is None else block | {"input": arguments}


def signature(thinking: str) -> str:
    """Something for clients that refuse thinking without one. Nobody checks it when it comes back."""
    return base64.b64encode(hashlib.sha256(thinking.encode("utf-8", "replace")).digest()).decode("ascii")
