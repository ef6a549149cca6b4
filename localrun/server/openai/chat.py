"""POST /v1/chat/completions.

The conversation goes through the model's chat template, and what the model writes through the parser of its format. A
conversation longer than the context is refused with both numbers; nothing is cut silently.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec

from localrun.server.http import bodies
from localrun.server.http.exchange import Exchange
from localrun.server.http.fields import defaults_of
from localrun.server.jobs import streaming
from localrun.server.openai.chat_body import ChatBody
from localrun.server.openai.chat_chunks import ChatChunks
from localrun.server.openai.generation import Answer
from localrun.server.openai.prompt_field import naming
from localrun.server.parsing.pieces import Reply
from localrun.server.prompting.conversation import begun
from localrun.server.prompting.prepare import prepare
from localrun.server.runtime import Runtime


async def chat(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await bodies.read(exchange, ChatBody)
    body.check_supported()
    ask = body.ask()
    async with exchange.while_connected(), AsyncExitStack() as stack:
        jobs = await streaming.enter(runtime, exchange, stack, model=body.model, fields=body, n_jobs=body.n_choices)
        messages = begun(jobs[0].model, ask.messages)
        with naming("messages"):
            prepared = await prepare(runtime, jobs[0], msgspec.structs.replace(ask, messages=messages))
        plan = streaming.plan(
            body,
            jobs[0],
            defaults_of(jobs[0].model),
            max_output=body.max_output,
            stop=prepared.stop,
            grammar=prepared.grammar,
            show_control=prepared.show_control,
            logprobs=bool(body.logprobs),
            n_probs=body.top_logprobs or 0,
        )
        for index, job in enumerate(jobs):
            await job.submit(plan, segments=prepared.segments, choice=index)
        chunks = ChatChunks(
            request_id=streaming.answer_id(jobs),
            model=body.model,
            include_usage=body.include_usage,
            replies=[Reply(prepared.new_parser()) for _ in jobs],
            uses_functions=body.uses_functions,
        )
        answer = Answer(
            exchange,
            jobs,
            chunks,
            n_per_prompt=body.n_choices,
            include_usage=body.include_usage,
            prompt_field="messages",
        )
        await answer.send(stream=bool(body.stream))
