"""POST /api/generate.

The prompt goes through the chat template as one user message, after `system`; with `raw` it goes to the model as it is,
control tokens included; with `suffix` the model fills in between the two. `context` of an earlier answer continues it.
No prompt at all is a request to load the model, or with `keep_alive` 0 to unload it.
"""

from __future__ import annotations

import msgspec

from localrun.errors import BadRequest
from localrun.server.http import bodies, caller
from localrun.server.http.exchange import Exchange
from localrun.server.jobs.job import Job
from localrun.server.ollama import fitting, generation, loading
from localrun.server.ollama.fitting import Fitted, Tokens
from localrun.server.ollama.generate_body import GenerateBody
from localrun.server.ollama.lines import Kind, Lines
from localrun.server.ollama.options import Options
from localrun.server.prompting.conversation import begun
from localrun.server.prompting.prepare import prepare
from localrun.server.runtime import Runtime
from localrun.wire import Segment


async def generate(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await bodies.read(exchange, GenerateBody)
    body.check_supported()
    # Refused before the model is loaded, as is all that can be.
    body.ask()
    who = caller.ask(exchange, body.model, body)
    lines = Lines(body.model, Kind.GENERATE)
    async with exchange.while_connected():
        if not body.prompt and not body.suffix:
            await loading.load_or_unload(runtime, exchange, who, lines)
            return
        async with runtime.job(who) as job:
            options = (body.options or Options()).over(job.model)
            fitted = await _fitted(runtime, job, body, options)
            context = None if body.is_plain else fitted.tokens
            await generation.answer(exchange, job, body, options, fitted, lines, context=context)


async def _fitted(runtime: Runtime, job: Job, body: GenerateBody, options: Options) -> Fitted:
    may_cut = body.truncate is not False
    if body.suffix:
        grammar = body.answer_grammar()
        return await fitting.fit_infill(job, body.prompt or "", body.suffix, grammar, options, may_cut=may_cut)
    if body.raw:
        prepared = fitting.plain((Segment(body.prompt or ""),), body.answer_grammar())
    else:
        ask = await fitting.thinks_by_default(job, body.ask())
        if not body.context:  # what it continues began with the model's own messages already
            ask = msgspec.structs.replace(ask, messages=begun(job.model, ask.messages))
        prepared = await prepare(runtime, job, ask)
    tokens = await job.count(prepared.segments)
    if body.context:
        tokens = _after(job, body.context, tokens)
    return fitting.fit_tokens(job, prepared, tokens, options, may_cut=may_cut)


def _after(job: Job, context: list[int], tokens: Tokens) -> Tokens:
    """The prompt behind what it continues. Raises BadRequest for a context of another model."""
    largest = max(context)
    if largest >= job.n_vocab:
        raise BadRequest(
            f"context: {largest} is not a token of this model, which has {job.n_vocab}; use the context of an earlier "
            f"answer of the same model",
            field="context",
        )
    bos = job.model.header.metadata.get("tokenizer.ggml.bos_token_id")
    # Every prompt begins with BOS where the model has one; in the middle of a text it would end it.
    return (*context, *(tokens[1:] if tokens and tokens[0] == bos else tokens))
