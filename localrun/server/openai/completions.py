"""POST /v1/completions.

Prompts go to the model as they are, control tokens included; each of them, and each of `n` answers to it, is a job of
its own. A prompt longer than the context is refused with both numbers; nothing is cut silently. Without `max_tokens` an
answer goes on until the model ends it or the context is full, as with llama-server and Ollama (OpenAI stops at 16).
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from localrun.server.http import bodies
from localrun.server.http.exchange import Exchange
from localrun.server.openai import bodies as openai_bodies
from localrun.server.openai import jobs as openai_jobs
from localrun.server.openai.bodies import CompletionBody
from localrun.server.openai.chunks import CompletionChunks
from localrun.server.openai.generation import Answer
from localrun.server.runtime import Runtime
from localrun.wire import Segment


async def complete(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = bodies.decode(await exchange.read_body(), CompletionBody)
    body.check_supported()
    prompts = [prompt for prompt in body.prompts() for _ in range(body.n_choices)]
    async with exchange.while_connected(), AsyncExitStack() as stack:
        jobs = await openai_jobs.enter(
            runtime,
            exchange,
            stack,
            model=body.model,
            keep_alive_value=body.keep_alive,
            fields=body,
            n_jobs=len(prompts),
        )
        n_vocab = jobs[0].n_vocab
        openai_bodies.check_tokens(prompts, n_vocab)
        sampling = body.sampling(n_vocab)
        for index, (job, prompt) in enumerate(zip(jobs, prompts, strict=True)):
            await job.submit(
                segments=(Segment(prompt),) if isinstance(prompt, str) else (),
                tokens=None if isinstance(prompt, str) else prompt,
                sampling=openai_jobs.for_choice(sampling, index % body.n_choices),
                n_predict=body.max_tokens or -1,
                stop=body.stop_strings,
                ignore_eos=bool(body.ignore_eos),
                logprobs=body.logprobs is not None,
                n_probs=body.logprobs or 0,
            )
        chunks = CompletionChunks(
            request_id=openai_jobs.answer_id(jobs),
            model=body.model,
            include_usage=body.include_usage,
            echoes=[prompt for prompt in prompts if isinstance(prompt, str)] if body.echo else (),
        )
        answer = Answer(
            exchange, jobs, chunks, n_per_prompt=body.n_choices, include_usage=body.include_usage, prompt_field="prompt"
        )
        await answer.send(stream=bool(body.stream))
