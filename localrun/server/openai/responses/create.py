"""The routes of responses (create, read, delete), and the response object: what was asked, what came of it and what it
took.

A response is one answer to a conversation of items: those of the response it goes on with, then those of `input`.
When it ends well, or at its limit, it is kept before its end is sent, so that who goes on at once finds it.
What only OpenAI's service can do (background runs, stored prompts, conversations as objects) is refused with the
field's name.
Does not: read the input items or the tools (`items.py`), or build the output items (`output.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest, ContextExceeded, LocalrunError, NotSupported, QueueFull
from localrun.server import notices, streaming
from localrun.server.http import fields
from localrun.server.http.exchange import Exchange, apart
from localrun.server.http.failures import Headers
from localrun.server.jobs.job import Job
from localrun.server.openai.answer import Fields, Running, encode, headers_of, naming
from localrun.server.openai.bodies import JsonSchema, LimitFields, ResponseFormat, grammar_of_format
from localrun.server.openai.chat import ChatReasoning, Effort, InputTokens, budgets_of, think_of
from localrun.server.openai.responses.items import (
    Item,
    Offered,
    items_of,
    left_out,
    messages_of,
    new_id,
    offered,
    tools_in,
)
from localrun.server.openai.responses.kept import KeptResponses
from localrun.server.openai.responses.output import Events, Output
from localrun.server.parsing.pieces import Reply, ended
from localrun.server.prompting.ask import MAX_MESSAGES, MAX_TOOLS, Attachments, ChatRequest, Choice, choose_tools
from localrun.server.prompting.conversation import begun
from localrun.server.prompting.fitting import Fitted, fit_chat
from localrun.server.prompting.prepare import thinks_by_default
from localrun.server.routing import RoutingInput
from localrun.server.runtime import Runtime
from localrun.wire import Delta, Finish, Grammar, Sampling, Usage

LOGPROBS = "message.output_text.logprobs"

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`text.format`."""

    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: Any = msgspec.UNSET
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`text`."""

    format: TextFormat | None = None


class Reasoning(ChatReasoning, frozen=True, kw_only=True):
    """With `summary`, the thinking comes as the summary, which is what many clients show."""

    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(LimitFields, frozen=True, kw_only=True):
    """POST /v1/responses. What has another name in chats is taken by that name as well."""

    model: fields.ModelName = ""
    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: int | None = None
    include: list[str] | None = None
    top_logprobs: fields.TopLogprobs | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None

    @property
    def is_kept(self) -> bool:
        """Whether `previous_response_id` can name it later. It can unless the client says otherwise."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def summarizes(self) -> bool:
        """Whether thinking is to be sent as the summary of the reasoning."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    @property
    def effort(self) -> str | None:
        said = (self.reasoning and self.reasoning.effort) or self.reasoning_effort
        is_off = (self.reasoning is not None and self.reasoning.enabled is False) or 0 in self.budgets.values()
        return "none" if said is None and is_off else said

    @property
    def budgets(self) -> dict[str, int]:
        return budgets_of(self, "thinking_token_budget")

    def check_supported(self) -> None:
        """Raises BadRequest for what this build does not do."""
        if self.background:
            raise BadRequest.of("background", "not supported; leave it out, and stream to see progress")
        if self.conversation is not None:
            raise BadRequest.of("conversation", "not supported; use previous_response_id, or send the items as input")
        if self.prompt is not None:
            raise BadRequest.of("prompt", "stored prompts are not supported; send input and instructions")

    def answer_grammar(self) -> Grammar | None:
        """Of `text.format`, and as in chats; None for free text. Raises BadRequest for what a grammar cannot hold an
        answer to."""
        asked = self.text.format if self.text is not None else None
        if asked is None or asked.type == "text":
            return super().answer_grammar()
        described = JsonSchema(name=asked.name, schema=asked.schema, strict=asked.strict)
        wanted = ResponseFormat(type=asked.type, json_schema=described)
        return grammar_of_format(wanted, path=("text.format", "schema"))


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a response, or of all lines of a batch so far."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """The response is forgotten."""

    id: str
    object: Literal["response"]
    deleted: bool


class ResponseItems(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation that a response answered, newest item first."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def begun_response(response_id: str, body: ResponsesBody, sampling: Sampling, tools: Sequence[Fields]) -> Fields:
    """The object of a response that runs. `sampling` is what came of the request and of the model's parameters, `tools`
    those that the model was given, as the client wrote them."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": body.effort,
            "summary": (body.reasoning.summary or body.reasoning.generate_summary) if body.reasoning else None,
        },
        "service_tier": "default",
        "store": body.is_kept,
        "temperature": sampling.temperature,
        "text": {"format": _format(body)},
        "tool_choice": "auto" if body.tool_choice is None else _without_none(body.tool_choice),
        "tools": [tool | {"strict": tool.get("strict") or False} for tool in tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


def ended_response(response: Fields, output: Sequence[Fields], finish: Finish, usage: TokenUsage) -> Fields:
    is_cut = finish is Finish.LENGTH
    return response | {
        "status": "incomplete" if is_cut else "completed",
        "completed_at": None if is_cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": list(output),
        "usage": usage,
    }


def failed_response(response: Fields, output: Sequence[Fields], error: LocalrunError) -> Fields:
    code = "rate_limit_exceeded" if isinstance(error, QueueFull) else "server_error"
    if isinstance(error, ContextExceeded):
        code = error.code
    return response | {
        "status": "failed",
        "output": list(output),
        "error": {"code": code, "message": error.message, "type": error.code, "param": error.field},
    }


def _usage(usage: Usage, n_thinking: int) -> TokenUsage:
    # Nothing is written into a cache at a price of its own, and clients take those tokens off the input.
    return TokenUsage(
        input_tokens=usage.n_prompt,
        input_tokens_details={"cached_tokens": usage.n_cached, "cache_write_tokens": 0},
        output_tokens=usage.n_output,
        output_tokens_details={"reasoning_tokens": n_thinking},
        total_tokens=usage.n_prompt + usage.n_output,
    )


def _format(body: ResponsesBody) -> Fields:
    """Of what has the shape by its name in chats, as responses would have said it."""
    asked = body.text.format if body.text is not None else None
    chats = body.response_format
    if asked is None and chats is not None:
        return _without_none(chats.json_schema or JsonSchema(schema=chats.schema)) | {"type": chats.type}
    return {"type": "text"} if asked is None else _without_none(asked)


def _without_none(asked: object) -> Fields:
    """A struct of the body, as the client wrote it."""
    fields: Fields = msgspec.to_builtins(asked)
    return {name: value for name, value in fields.items() if value is not None} if isinstance(fields, dict) else fields


_COMPACT_YOURSELF = (
    "nothing here makes an item of OpenAI's own form of a conversation; ask for a summary as for anything else, as "
    "Codex does by itself if its model provider has another name than OpenAI"
)


class _Asked(NamedTuple):
    """What a body comes to."""

    conversation: list[Item]
    found: Offered
    ask: ChatRequest


def _asked(body: ResponsesBody, before: Sequence[Item], find: Callable[[str], Item | None]) -> _Asked:
    sent = items_of(body.input, find)
    # Checked as what was sent, so that an error names the item of this body.
    messages_of(None, sent, Attachments())
    if sent[-1]["type"] == "compaction_trigger":
        raise BadRequest.of(f"input[{len(sent) - 1}]", f"not supported; {_COMPACT_YOURSELF}")
    conversation = [*before, *sent]
    found = offered([*(body.tools or ()), *tools_in(conversation)])
    tools, choice = choose_tools(found.choice(body.tool_choice), found.tools)
    media = Attachments()
    ask = ChatRequest(
        messages=messages_of(body.instructions, conversation, media),
        tools=tools,
        tool_choice=choice,
        parallel_calls=body.parallel_tool_calls is not False,
        response_grammar=body.answer_grammar(),
        think=think_of(body.effort),
        passed_over="reasoning.effort",
        thinking_limit=next(iter(body.budgets), ""),
        media=media.all(),
    )
    notices.note(*found.left_out, *left_out(sent))
    return _Asked(conversation, found, ask)


async def _read_body(runtime: Runtime, exchange: Exchange) -> tuple[ResponsesBody, _Asked]:
    body = await exchange.read_json(ResponsesBody)
    body.check_supported()
    owner = exchange.caller.namespace
    before: tuple[Item, ...] = ()
    if body.previous_response_id is not None:
        before = runtime.responses.get(body.previous_response_id, owner, field="previous_response_id").conversation
    return body, await apart(partial(_asked, body, before, partial(runtime.responses.item, owner=owner)))


async def _fitted(runtime: Runtime, job: Job, body: ResponsesBody, ask: ChatRequest) -> Fitted:
    whole = thinks_by_default(job, msgspec.structs.replace(ask, messages=begun(job.model, ask.messages)))
    n_predict, may_cut = body.max_output or -1, body.truncation == "auto"
    with naming("input"):
        return await fit_chat(runtime, job, whole, n_predict=n_predict, n_keep=-1, may_cut=may_cut)


async def count(runtime: Runtime, exchange: Exchange) -> None:
    """POST /v1/responses/input_tokens: what the prompt of a response comes to."""
    body, asked = await _read_body(runtime, exchange)
    question = RoutingInput(ask=asked.ask, effort=body.effort, may_probe=False)
    async with streaming.entered(runtime, exchange, body, question) as (body, ask, [job]):
        fitted = await _fitted(runtime, job, body, ask)
        tokens = fitted.tokens if fitted.tokens is not None else await job.count(fitted.prepared.segments)
        await exchange.answer_json(InputTokens(input_tokens=len(tokens)))


async def create(runtime: Runtime, exchange: Exchange) -> None:
    body, asked = await _read_body(runtime, exchange)
    try:
        await _answer(runtime, exchange, body, asked)
    except ContextExceeded as error:
        if exchange.started or not body.stream:
            raise
        await _answer_too_long(exchange, body, asked, exchange.redacted(error))


async def _answer(runtime: Runtime, exchange: Exchange, body: ResponsesBody, asked: _Asked) -> None:
    conversation, found, ask = asked
    question = RoutingInput(ask=ask, effort=body.effort)
    async with streaming.entered(runtime, exchange, body, question) as (body, ask, [job]):
        fitted = await _fitted(runtime, job, body, ask)
        prepared = fitted.prepared
        plan = await streaming.plan(
            body,
            job,
            max_output=body.max_output,
            prepared=prepared,
            logprobs=body.wants_logprobs,
            n_probs=body.top_logprobs or 0,
        )
        await fitted.submit(job, plan)
        events = Events()
        run = _Run(
            exchange,
            job,
            Reply(prepared.new_parser()),
            begun_response("resp_" + streaming.answer_id([job]), body, plan.sampling, found.written),
            events,
            Output(events, found.clients, summarizes=body.summarizes),
            kept=runtime.responses if body.is_kept else None,
            conversation=conversation,
            headers=[*headers_of([job]), *fitted.headers],
        )
        with naming("input"):
            tells = body.return_progress or body.timings_per_token
            writer = Running(run, [job], body, run.going_on, times_end=True) if tells else run
            await run.send(stream=bool(body.stream), writer=writer)


async def _answer_too_long(exchange: Exchange, body: ResponsesBody, asked: _Asked, error: LocalrunError) -> None:
    """A stream that tells of nothing else, as OpenAI's does: Codex shortens its conversation when it reads this, and
    does not when the status is 400."""
    events = Events()
    response = begun_response(new_id("resp"), body, fields.sampling((body,), Sampling()), asked.found.written)
    told = {"message": error.message, "type": "invalid_request_error", "param": error.field, "code": error.code}
    await exchange.open_stream([(b"x-localrun-error", error.code.encode())])
    await exchange.close_stream(
        events.event("response.created", {"response": response})
        + events.event("response.in_progress", {"response": response})
        + events.event("error", {"error": told})
        + events.event("response.failed", {"response": failed_response(response, [], error)})
    )


@dataclass
class _Run:
    """One response that runs; it is kept in `kept`, where there is one, before its end is sent."""

    exchange: Exchange
    job: Job
    reply: Reply
    response: Fields
    events: Events
    output: Output
    kept: KeptResponses | None
    conversation: list[Item]
    headers: Headers

    async def send(self, *, stream: bool, writer: streaming.Writer) -> None:
        """Sends all of it. Raises what the job's iteration raises, unless a stream has begun: then its last event says
        it."""
        if not stream:
            async for delta in self.job:
                self.take(0, delta)
            await self.exchange.answer(encode(self.response), headers=self.headers)
            return
        # Codex counts events alone, not comments, as signs of life.
        self.exchange.ping = partial(self.going_on, 0, {})
        try:
            await streaming.stream(self.exchange, [self.job], writer, self.headers)
        except LocalrunError as error:
            if not self.exchange.started:
                raise
            self.response = failed_response(self.response, self.output.items, self.exchange.redacted(error))
            await self.exchange.close_stream(self.end())

    # --- as the writer of a stream -------------------------------------------------------------------------------

    def begin(self) -> bytes:
        return self._event("response.created") + self._event("response.in_progress")

    def take(self, _: int, delta: Delta) -> bytes:
        told = self.output.take(self.reply.take(delta), delta.logprobs)
        if delta.finish is None:
            return told
        finish, usage = ended(delta)
        told += self.output.finish(
            status="incomplete" if finish is Finish.LENGTH or self.reply.is_in_call else "completed"
        )
        if self.reply.n_calls:
            self.job.record.called()
        counts = _usage(usage, self.reply.n_thinking)
        self.response = ended_response(self.response, self.output.items, finish, counts)
        if self.kept is not None:
            self.kept.add(self.response, self.conversation, self.exchange.caller.namespace)
        return told

    def end(self) -> bytes:
        """How it ended, also when it broke off."""
        return self._event(f"response.{self.response['status']}")

    def going_on(self, _: int, fields: Fields) -> bytes:
        """An event that says that it runs, with more fields."""
        return self.events.event("response.in_progress", {"response": self.response} | fields)

    def _event(self, kind: str) -> bytes:
        return self.events.event(kind, {"response": self.response})


async def compact(_: Runtime, exchange: Exchange) -> None:
    await exchange.read_body()
    raise NotSupported(f"/v1/responses/compact is not supported; {_COMPACT_YOURSELF}")


async def read(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer(encode(runtime.responses.get(exchange.path_id, exchange.caller.namespace).response))


async def delete(runtime: Runtime, exchange: Exchange) -> None:
    runtime.responses.delete(exchange.path_id, exchange.caller.namespace)
    await exchange.answer(encode(ResponseDeleted(id=exchange.path_id, object="response", deleted=True)))


async def input_items(runtime: Runtime, exchange: Exchange) -> None:
    """The newest first, as OpenAI lists them; all of them."""
    items = list(reversed(runtime.responses.get(exchange.path_id, exchange.caller.namespace).input))
    ids = [item.get("id") for item in items]
    listed = ResponseItems(object="list", data=items, first_id=ids[0], last_id=ids[-1], has_more=False)
    await exchange.answer(encode(listed))
