"""Filling in the middle: POST /v1/fim/completions, as Mistral has it. llama-server's `/infill` is in `llama_server/`.

The request is like that of completions, the answer like that of chat. A model without FIM tokens is refused, also when
there is no suffix: an editor that asks here wants code that fits, not a chat model's continuation.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec

from localrun.server import streaming
from localrun.server.http.exchange import Exchange
from localrun.server.http.fields import defaults_of
from localrun.server.openai.answer import Answer, ChatChunks
from localrun.server.openai.completions import FimBody
from localrun.server.parsing.pieces import PlainParser, Reply
from localrun.server.prompting.infill import infill
from localrun.server.routing import Question
from localrun.server.runtime import Runtime


async def complete_fim(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await exchange.read_json(FimBody)
    if body.seed is None and body.random_seed is not None:
        body = msgspec.structs.replace(body, seed=body.random_seed)
    async with exchange.while_connected(), AsyncExitStack() as stack:
        question = Question(prompts=[body.prompt], suffix=body.suffix or "", fills_in=True)
        body, _, jobs = await streaming.enter(runtime, exchange, stack, body, question)
        segments = infill(jobs[0].model.header, body.prompt, body.suffix or "", field="model")
        plan = await streaming.plan(body, jobs[0], defaults_of(jobs[0].model), max_output=body.max_tokens)
        await jobs[0].submit(plan, segments=segments)
        chunks = ChatChunks(
            request_id=streaming.answer_id(jobs),
            model=body.model,
            replies=[Reply(PlainParser())],
        )
        answer = Answer(exchange, jobs, chunks, n_per_prompt=1, include_usage=False, prompt_field="prompt")
        await answer.send(stream=bool(body.stream))
