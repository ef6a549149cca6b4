"""POST /api/chat and /api/generate: the prompt, the NDJSON lines of a stream, and the one object that stands for all of
them.

A conversation goes through the model's chat template, and what the model writes through the parser of its format; one
that is too long loses its oldest messages (`prompting/fitting.py`), unless `truncate` is false. The prompt of
`generate` is one user message, after `system`; with `raw` it goes to the model as it is, control tokens included; with
`suffix` the model fills in between the two. `context` of an earlier answer continues it; answers to pictures and sound
have none.

No messages or no prompt at all is a request to load the model, or with `keep_alive` 0 to unload it.

An answer runs in the task of the request. Lines are written once per token, so one is put together from bytes made once
per request, the time, and the encoded text. The same code makes the single answer of `stream: false`, so both have the
same fields.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from localrun.errors import BadRequest
from localrun.server import streaming
from localrun.server.http.exchange import Exchange, apart
from localrun.server.http.failures import Headers
from localrun.server.http.fields import job_request_of, keep_alive_s
from localrun.server.jobs.generation import Generation
from localrun.server.jobs.job import Job
from localrun.server.ollama.bodies import ChatBody, GenerateBody, Options, PromptFields
from localrun.server.openai.answer import Fields, encode, entries, headers_of
from localrun.server.parsing.pieces import (
    Call,
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reply,
    Thinking,
    ended,
    whole_arguments,
)
from localrun.server.prompting import fitting
from localrun.server.prompting.ask import ChatRequest
from localrun.server.prompting.conversation import begun
from localrun.server.prompting.fitting import Fitted, Tokens
from localrun.server.prompting.prepare import prepare, thinks_by_default
from localrun.server.prompting.segments import placed, shown
from localrun.server.routing import RoutingInput
from localrun.server.runtime import Runtime
from localrun.wire import ChosenLogprob, Delta, Segment, Submit, Usage


async def chat(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(ChatBody)
    ask = await apart(body.ask)
    if not ask.messages:
        async with exchange.while_connected():
            await load_or_unload(runtime, exchange, body, Lines(body.model, is_chat=True))
        return
    question = RoutingInput(ask=ask, effort=body.effort)
    entered = streaming.entered(runtime, exchange, body.service, question, load=body.load, needs_name=True)
    async with entered as (body, ask, [job]):
        options = (body.options or Options()).over(job.model)
        ask = msgspec.structs.replace(ask, messages=begun(job.model, ask.messages))
        ask = thinks_by_default(job, ask)
        may_cut = body.truncate is not False
        fitted = await fitting.fit_chat(
            runtime, job, ask, n_predict=options.n_predict, n_keep=options.n_keep, may_cut=may_cut
        )
        await answer(exchange, job, body, options, fitted, Lines(body.model, is_chat=True))


async def generate(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(GenerateBody)
    body.check_supported()
    # Refused before the model is loaded, as is all that can be.
    ask = await apart(body.ask)
    if not body.prompt and not body.suffix and not body.images:
        async with exchange.while_connected():
            await load_or_unload(runtime, exchange, body, Lines(body.model, is_chat=False))
        return
    question = RoutingInput(
        ask=ask, prompts=(body.prompt or "",), suffix=body.suffix or "", context=bool(body.context),
        is_raw=body.is_plain, effort=body.effort,
    )  # fmt: skip
    entered = streaming.entered(runtime, exchange, body.service, question, load=body.load, needs_name=True)
    async with entered as (body, ask, [job]):
        options = (body.options or Options()).over(job.model)
        fitted = await _fitted(runtime, job, body, ask, options)
        context = None if body.is_plain else fitted.tokens
        await answer(exchange, job, body, options, fitted, Lines(body.model, is_chat=False), context=context)


async def _fitted(runtime: Runtime, job: Job, body: GenerateBody, ask: ChatRequest, options: Options) -> Fitted:
    may_cut = body.truncate is not False
    if body.suffix:
        grammar = body.answer_grammar()
        return await fitting.fit_infill(
            job, body.prompt or "", body.suffix, grammar, n_predict=options.n_predict, may_cut=may_cut
        )
    if body.raw:
        prompt: tuple[Segment, ...] = (Segment(ask.messages[-1]["content"]),)
        if ask.media:
            media = await runtime.media.attach(job, ask.media)
            prompt = placed(prompt, ask.media, media, ask.messages)
        prepared = fitting.plain(prompt, body.answer_grammar())
    else:
        ask = thinks_by_default(job, ask)
        if not body.context:  # what it continues began with the model's own messages already
            ask = msgspec.structs.replace(ask, messages=begun(job.model, ask.messages))
        prepared = await prepare(runtime, job, ask)
    if ask.media:  # token ids do not say what is in a picture: such a prompt goes as it is, and is never cut
        return Fitted(prepared)
    tokens = await job.count(prepared.segments)
    if body.context:
        tokens = _after(job, body.context, tokens)
        if body.debug_render_only:
            began = Segment(await job.text_of(body.context))
            prepared = msgspec.structs.replace(prepared, segments=(began, *prepared.segments))
    return fitting.fit_tokens(
        job, prepared, tokens, n_predict=options.n_predict, n_keep=options.n_keep, may_cut=may_cut
    )


def _after(job: Job, context: list[int], tokens: Tokens) -> Tokens:
    """The prompt behind what it continues. Raises BadRequest for a context of another model."""
    largest = max(context)
    if largest >= job.ready.n_vocab:
        raise BadRequest.of(
            "context",
            f"{largest} is not a token of this model, which has {job.ready.n_vocab}; use the context of an earlier "
            f"answer of the same model",
        )
    bos = job.model.header.metadata.get("tokenizer.ggml.bos_token_id")
    # Every prompt begins with BOS where the model has one; in the middle of a text it would end it.
    return (*context, *(tokens[1:] if tokens and tokens[0] == bos else tokens))


_NOTHING = Usage(n_prompt=0, n_cached=0, n_output=0, queued_s=0.0, prefill_s=0.0, decode_s=0.0)


async def load_or_unload(runtime: Runtime, exchange: Exchange, body: ChatBody | GenerateBody, lines: Lines) -> None:
    """Loads the model and answers when it is there; with a `keep_alive` of 0 unloads it. Of a tier both, the small one
    last, so that it is there if there is room for one only. Raises what loading raises."""
    tier = runtime.targets.tier(exchange.caller, body.model)
    names = (body.model,) if tier is None else (tier.large, tier.small)
    asks = [job_request_of(exchange, name, body.service, load=body.load) for name in names]
    if keep_alive_s(body.service.keep_alive) == 0:
        for name in names:
            exchange.caller.check_change(f"unload {name}")
            await runtime.unload(name)
        await exchange.answer(lines.end("unload", figures(_NOTHING, load_s=0.0, total_s=0.0)))
        return
    if tier is not None:
        await asyncio.to_thread(runtime.targets.models_of, tier)
    began_s, load_s = time.monotonic(), 0.0
    for ask in asks:
        async with runtime.job(ask) as job:
            load_s += job.load_s
    total_s = time.monotonic() - began_s
    await exchange.answer(lines.end("load", figures(_NOTHING, load_s=load_s, total_s=total_s)))


# {"id": ..., "function": {"index": 0, "name": ..., "arguments": {...}}}
ToolCall = dict[str, Any]


class Said(NamedTuple):
    """What an answer said, or a part of it."""

    text: str = ""
    thinking: str = ""
    tool_calls: Sequence[ToolCall] = ()


class Lines:
    """One answer's lines. `model` is shown as the client wrote it. The text of a chat is in `message`, that of generate
    in `response`."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._head = b'{"model":' + encode(model) + b',"created_at":"'
        self._before_text = b'","message":{"role":"assistant","content":' if is_chat else b'","response":'
        self._after_text = b"}" if is_chat else b""
        self._more = self._after_text + b',"done":false}\n'

    def text(self, text: str, logprobs: Sequence[ChosenLogprob] | None = None) -> bytes:
        if not logprobs:
            return self._head + rfc3339_now() + self._before_text + encode(text) + self._more
        return self.part(Said(text), logprobs)

    def part(self, said: Said, logprobs: Sequence[ChosenLogprob] | None = None) -> bytes:
        beside: Fields = {"logprobs": entries(logprobs)} if logprobs else {}
        return self._with_fields(said, beside | {"done": False})

    def end(self, reason: str, fields: Fields, *, said: Said | None = None) -> bytes:
        """The last line, or with `said` the only one."""
        return self._with_fields(said or Said(), {"done": True, "done_reason": reason} | fields)

    def rendered(self, segments: Sequence[Segment]) -> bytes:
        """The answer to who only wants to see the prompt."""
        prompt, n_media = shown(segments)
        told = {"rendered_template": prompt, "image_count": n_media}
        return self._with_fields(Said(), {"done": False, "_debug_info": told})

    def _with_fields(self, said: Said, fields: Fields) -> bytes:
        beside: Fields = {}
        if said.thinking:
            beside["thinking"] = said.thinking
        if said.tool_calls:
            beside["tool_calls"] = said.tool_calls
        # Chat has them in the message, generate beside the response: both times right behind the text.
        more = b"," + encode(beside)[1:-1] if beside else b""
        rest = self._after_text + b"," + encode(fields)[1:] + b"\n"
        return self._head + rfc3339_now() + self._before_text + encode(said.text) + more + rest


def figures(usage: Usage, *, load_s: float, total_s: float) -> dict[str, int]:
    """Counts and integer nanoseconds. All of them are always there, and no duration that clients divide by is 0."""
    return {
        "total_duration": _ns(total_s),
        "load_duration": _ns(load_s),
        "prompt_eval_count": usage.n_prompt,
        "prompt_eval_cached_count": usage.n_cached,
        "prompt_eval_duration": max(1, _ns(usage.prefill_s)),
        "eval_count": usage.n_output,
        "eval_duration": max(1, _ns(usage.decode_s)),
    }


def draft_counts(record: Generation) -> Fields:
    """Not Ollama's: what came of drafting, where anything was drafted."""
    if not record.n_drafted:
        return {}
    said: Fields = {"draft_count": record.n_drafted, "draft_accepted_count": record.n_accepted}
    return said if record.speedup is None else said | {"speedup": round(record.speedup, 3)}


def rfc3339(moment_ns: int) -> bytes:
    """Nanoseconds since 1970 as UTC text."""
    seconds, rest = divmod(moment_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)).encode("ascii") + b".%09dZ" % rest


_second = -1
_second_text = b""


def rfc3339_now() -> bytes:
    """As `rfc3339`, now; the part above the second is made once a second."""
    global _second, _second_text
    seconds, rest = divmod(time.time_ns(), 1_000_000_000)
    if seconds != _second:
        _second_text = rfc3339(seconds * 1_000_000_000)[:19]
        _second = seconds
    return _second_text + b".%09dZ" % rest


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class Parts:
    """One answer's. A call is whole when the next piece is another's."""

    def __init__(self) -> None:
        self._open: Call | None = None
        self.n_calls = 0

    def take(self, pieces: Sequence[Piece], *, is_end: bool) -> list[Said]:
        """The parts that `pieces` complete, in their order. With `is_end` no more follow."""
        parts: list[Said] = []
        for piece in pieces:
            if isinstance(piece, CallArguments):
                if self._open is not None:
                    self._open.arguments.append(piece.text)
                continue
            parts += self._closed()
            if isinstance(piece, Content):
                parts.append(Said(text=piece.text))
            elif isinstance(piece, Thinking):
                parts.append(Said(thinking=piece.text))
            elif isinstance(piece, CallStart):
                self._open = Call(piece.id, piece.name)
        return parts + self._closed() if is_end else parts

    def _closed(self) -> list[Said]:
        call, self._open = self._open, None
        if call is None:
            return []
        whole = tool_call(call, self.n_calls)
        if whole is None:
            return []
        self.n_calls += 1
        return [Said(tool_calls=(whole,))]


def tool_call(call: Call, index: int) -> ToolCall | None:
    """A call in Ollama's form; None for one that was cut off."""
    arguments = whole_arguments(call.arguments_text)
    if arguments is None:
        return None
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def joined(parts: Sequence[Said]) -> Said:
    return Said(
        text="".join(part.text for part in parts),
        thinking="".join(part.thinking for part in parts),
        tool_calls=[call for part in parts for call in part.tool_calls],
    )


async def answer(
    exchange: Exchange,
    job: Job,
    body: PromptFields,
    options: Options,
    fitted: Fitted,
    lines: Lines,
    *,
    context: Tokens | None = None,
) -> None:
    """Sends the prompt to the engine and the answer to the client. With `context`, which is the whole prompt, the last
    line has it and the generated tokens. Raises what the engine refuses."""
    prepared = fitted.prepared
    if body.debug_render_only:
        await exchange.answer(lines.rendered(prepared.segments))
        return
    asked = Submit(
        id=0,
        sampling=options.sampling(),
        n_predict=options.n_predict,
        stop=(*options.stop_strings, *prepared.stop),
        logprobs=bool(body.logprobs),
        n_probs=body.top_logprobs or 0,
        grammar=prepared.grammar,
        show_control=prepared.show_control,
    )
    await fitted.submit(job, asked)
    headers = [*headers_of([job]), *fitted.headers]
    sender = _Answer(exchange, job, lines, Reply(prepared.new_parser()), context, headers)
    if body.stream is not False:
        await streaming.stream(exchange, [job], sender, headers)
    else:
        await sender.whole()


@dataclass
class _Answer(streaming.Writer):
    """One answer, sent once."""

    exchange: Exchange
    job: Job
    lines: Lines
    reply: Reply
    context: Tokens | None
    headers: Headers
    parts: Parts = field(default_factory=Parts)
    output_tokens: list[int] = field(default_factory=list)

    def take(self, _: int, delta: Delta) -> bytes:
        update = b"".join(self._update(delta))
        if delta.finish is None:
            return update
        return update + self.lines.end(delta.finish.value, self._last_fields(delta))

    async def whole(self) -> None:
        """Sends all of it at once. Raises what the job's iteration raises, and Cancelled: `stop` would be a lie."""
        parts: list[Said] = []
        logprobs: list[ChosenLogprob] = []
        async for delta in self.job:
            parts += self._take(delta)
            logprobs += delta.logprobs or ()
            if delta.finish is None:
                continue
            finish, _ = ended(delta)
            fields = self._last_fields(delta)
            if logprobs:
                fields["logprobs"] = entries(logprobs)
            line = self.lines.end(finish.value, fields, said=joined(parts))
            await self.exchange.answer(line, headers=self.headers)

    def _update(self, delta: Delta) -> list[bytes]:
        """The lines of a delta. Its log-probabilities are in the first of them, or in an empty one."""
        parts, logprobs = self._take(delta), delta.logprobs
        if not parts:
            return [self.lines.text("", logprobs)] if logprobs else []
        update = []
        for part in parts:
            is_text = not part.thinking and not part.tool_calls
            update.append(self.lines.text(part.text, logprobs) if is_text else self.lines.part(part, logprobs))
            logprobs = None
        return update

    def _take(self, delta: Delta) -> list[Said]:
        self.output_tokens += delta.tokens
        return self.parts.take(self.reply.take(delta), is_end=delta.finish is not None)

    def _last_fields(self, delta: Delta) -> Fields:
        if self.parts.n_calls:
            self.job.record.called()
        fields: Fields = {}
        if self.context is not None:
            fields["context"] = [*self.context, *self.output_tokens]
        if delta.usage is not None:
            total_s = time.monotonic() - self.job.arrived_at_s
            fields |= figures(delta.usage, load_s=self.job.load_s, total_s=total_s) | draft_counts(self.job.record)
        return fields
