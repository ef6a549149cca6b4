"""POST /v1/completions.

Prompts go to the model as they are, control tokens included; each of them, and each of its answers, is a job of its
own. With `suffix` the model fills in between the two. A prompt longer than the context is refused with both numbers;
nothing is cut silently. Without `max_tokens` an answer goes on until the model ends it or the context is full, as with
llama-server and Ollama (OpenAI stops at 16).
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from localrun.server.http import bodies
from localrun.server.http.exchange import Exchange
from localrun.server.http.fields import defaults_of
from localrun.server.jobs import streaming
from localrun.server.jobs.job import Job
from localrun.server.openai import completion_body
from localrun.server.openai.chunks import Fields
from localrun.server.openai.completion_body import CompletionBody, Prompt
from localrun.server.openai.completion_chunks import CompletionChunks
from localrun.server.openai.generation import Answer
from localrun.server.prompting.infill import infill
from localrun.server.runtime import Runtime
from localrun.wire import Segment


async def complete(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await bodies.read(exchange, CompletionBody)
    body.check_supported()
    prompts = [prompt for prompt in body.prompts() for _ in range(body.n_candidates)]
    grammar = body.answer_grammar()
    async with exchange.while_connected(), AsyncExitStack() as stack:
        jobs = await streaming.enter(runtime, exchange, stack, model=body.model, fields=body, n_jobs=len(prompts))
        completion_body.check_tokens(prompts, jobs[0].n_vocab)
        chooses = body.n_candidates > body.n_choices
        plan = streaming.plan(
            body,
            jobs[0],
            defaults_of(jobs[0].model),
            max_output=body.max_tokens,
            grammar=grammar,
            logprobs=body.logprobs is not None or chooses,
            n_probs=body.logprobs or 0,
        )
        for index, (job, prompt) in enumerate(zip(jobs, prompts, strict=True)):
            await job.submit(
                plan,
                segments=_segments(job, prompt, body.suffix),
                tokens=None if isinstance(prompt, str) else prompt,
                choice=index % body.n_candidates,
            )
        chunks = CompletionChunks(
            request_id=streaming.answer_id(jobs),
            model=body.model,
            include_usage=body.include_usage,
            echoes=[prompt for prompt in prompts if isinstance(prompt, str)] if body.echo else (),
            shows_logprobs=body.logprobs is not None,
        )
        answer = Answer(
            exchange,
            jobs,
            chunks,
            n_per_prompt=body.n_candidates,
            include_usage=body.include_usage,
            prompt_field="prompt",
        )
        if chooses:
            await answer.send_choices(best(chunks, await answer.gather(), body.n_candidates, body.n_choices))
        else:
            await answer.send(stream=bool(body.stream))


def best(chunks: CompletionChunks, reasons: list[str], n_candidates: int, n_choices: int) -> list[Fields]:
    """Of each prompt's candidates the `n_choices` that were the most probable per token, best first."""
    chosen: list[Fields] = []
    for start in range(0, len(reasons), n_candidates):
        ranked = sorted(range(start, start + n_candidates), key=chunks.score, reverse=True)
        for index in ranked[:n_choices]:
            chosen.append(chunks.choice(index, reasons[index]) | {"index": len(chosen)})
    return chosen


def _segments(job: Job, prompt: Prompt, suffix: str | None) -> tuple[Segment, ...]:
    if not isinstance(prompt, str):
        return ()
    if suffix:
        return infill(job.model.header, prompt, suffix, field="suffix")
    return (Segment(prompt),)
