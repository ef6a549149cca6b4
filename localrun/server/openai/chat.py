"""POST /v1/chat/completions.

The conversation goes through the model's chat template. A conversation longer than the context is refused with both
numbers; nothing is cut silently.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from localrun.server.http import bodies
from localrun.server.http.exchange import Exchange
from localrun.server.jobs import prompt
from localrun.server.openai import jobs as openai_jobs
from localrun.server.openai.bodies import ChatBody
from localrun.server.openai.chunks import ChatChunks
from localrun.server.openai.generation import Answer
from localrun.server.runtime import Runtime


async def chat(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = bodies.decode(await exchange.read_body(), ChatBody)
    body.check_supported()
    messages = body.template_messages()
    async with exchange.while_connected(), AsyncExitStack() as stack:
        jobs = await openai_jobs.enter(
            runtime,
            exchange,
            stack,
            model=body.model,
            keep_alive_value=body.keep_alive,
            fields=body,
            n_jobs=body.n_choices,
        )
        segments = await prompt.render(runtime, jobs[0], messages)
        sampling = body.sampling(jobs[0].n_vocab)
        for index, job in enumerate(jobs):
            await job.submit(
                segments=segments,
                sampling=openai_jobs.for_choice(sampling, index),
                n_predict=body.n_predict,
                stop=body.stop_strings,
                ignore_eos=bool(body.ignore_eos),
                logprobs=bool(body.logprobs),
                n_probs=body.top_logprobs or 0,
            )
        chunks = ChatChunks(request_id=openai_jobs.answer_id(jobs), model=body.model, include_usage=body.include_usage)
        answer = Answer(
            exchange,
            jobs,
            chunks,
            n_per_prompt=body.n_choices,
            include_usage=body.include_usage,
            prompt_field="messages",
        )
        await answer.send(stream=bool(body.stream))
