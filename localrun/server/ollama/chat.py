"""POST /api/chat and /api/generate.

A conversation goes through the model's chat template, and what the model writes through the parser of its format; one
that is too long loses its oldest messages (`prompting/fitting.py`), unless `truncate` is false. The prompt of
`generate` is one user message, after `system`; with `raw` it goes to the model as it is, control tokens included; with
`suffix` the model fills in between the two. `context` of an earlier answer continues it; answers to pictures and sound
have none.

No messages or no prompt at all is a request to load the model, or with `keep_alive` 0 to unload it.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from localrun.errors import bad_field
from localrun.server import streaming
from localrun.server.http.exchange import Exchange
from localrun.server.http.fields import job_request_of, keep_alive_s
from localrun.server.http.loop_watch import apart
from localrun.server.jobs.job import Job
from localrun.server.ollama.answer import Lines, answer, figures
from localrun.server.ollama.bodies import ChatBody, GenerateBody, Options
from localrun.server.prompting import fitting
from localrun.server.prompting.ask import ChatRequest
from localrun.server.prompting.conversation import begun
from localrun.server.prompting.fitting import Fitted, Tokens
from localrun.server.prompting.places import placed
from localrun.server.prompting.prepare import prepare, thinks_by_default
from localrun.server.routing import RoutingInput
from localrun.server.runtime import Runtime
from localrun.wire import Segment, Usage


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
            began = await job.tokenize([Segment("", tokens=tuple(body.context))], is_prompt=False, wants_pieces=True)
            text = b"".join(began.pieces).decode("utf-8", errors="replace")
            prepared = msgspec.structs.replace(prepared, segments=(Segment(text), *prepared.segments))
    return fitting.fit_tokens(
        job, prepared, tokens, n_predict=options.n_predict, n_keep=options.n_keep, may_cut=may_cut
    )


def _after(job: Job, context: list[int], tokens: Tokens) -> Tokens:
    """The prompt behind what it continues. Raises BadRequest for a context of another model."""
    largest = max(context)
    if largest >= job.n_vocab:
        raise bad_field(
            "context",
            f"{largest} is not a token of this model, which has {job.n_vocab}; use the context of an earlier "
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
