"""POST /api/generate.

The prompt goes through the chat template as one user message, after `system`; with `raw` it goes to the model as it is,
control tokens included. `context` of an earlier answer continues it. An empty prompt is a request to load the model, or
with `keep_alive` 0 to unload it.
"""

from __future__ import annotations

from localrun.errors import BadRequest
from localrun.server.http import bodies, caller, keep_alive
from localrun.server.http.exchange import Exchange
from localrun.server.jobs import prompt
from localrun.server.jobs.job import Job
from localrun.server.jobs.prompt import Message
from localrun.server.ollama import loading as ollama_loading
from localrun.server.ollama import truncation
from localrun.server.ollama.bodies import GenerateBody, Options
from localrun.server.ollama.generation import Answer
from localrun.server.ollama.lines import Kind, Lines
from localrun.server.ollama.truncation import Tokens
from localrun.server.runtime import Runtime
from localrun.wire import Segment


async def generate(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = bodies.decode(await exchange.read_body(), GenerateBody)
    body.check_supported()
    options = body.options or Options()
    ask = caller.ask(exchange, body.model, keep_alive_s=keep_alive.seconds(body.keep_alive), fields=body)
    lines = Lines(body.model, Kind.GENERATE)
    async with exchange.while_connected():
        if not body.prompt:
            await ollama_loading.load_or_unload(runtime, exchange, ask, lines)
            return
        async with runtime.job(ask) as job:
            whole = await _tokens(runtime, job, body, body.prompt)
            tokens = whole
            if body.truncate is not False:
                limit = truncation.limit_tokens(job.n_ctx, options.n_predict)
                tokens = truncation.cut_tokens(whole, limit=limit, n_keep=options.n_keep)
            await job.submit(
                tokens=tokens,
                sampling=options.sampling(),
                n_predict=options.n_predict,
                stop=options.stop_strings,
                logprobs=bool(body.logprobs),
                n_probs=body.top_logprobs or 0,
            )
            prompt_tokens = None if body.raw else tokens
            answer = Answer(exchange, job, lines, prompt_tokens=prompt_tokens, n_cut=len(whole) - len(tokens))
            await answer.send(stream=body.stream is not False)


async def _tokens(runtime: Runtime, job: Job, body: GenerateBody, text: str) -> Tokens:
    if body.raw:
        segments: tuple[Segment, ...] = (Segment(text),)
    else:
        messages: list[Message] = [{"role": "system", "content": body.system}] if body.system else []
        segments = await prompt.render(runtime, job, [*messages, {"role": "user", "content": text}])
    tokens = await job.count(segments)
    if not body.context or body.raw:
        return tokens
    largest = max(body.context)
    if largest >= job.n_vocab:
        raise BadRequest(
            f"context: {largest} is not a token of this model, which has {job.n_vocab}; use the context of an earlier "
            f"answer of the same model",
            field="context",
        )
    bos = job.model.header.metadata.get("tokenizer.ggml.bos_token_id")
    # Every prompt begins with BOS where the model has one; in the middle of a text it would end it.
    return (*body.context, *(tokens[1:] if tokens and tokens[0] == bos else tokens))
