"""POST /v1/messages/count_tokens: how long the prompt of a message would be, by the model's own tokenizer.

Loads the model, as its message would; generates nothing.
"""

from __future__ import annotations

from localrun.server.anthropic.body import CountBody
from localrun.server.anthropic.preparing import prepared_of
from localrun.server.http import bodies, caller
from localrun.server.http.exchange import Exchange
from localrun.server.runtime import Runtime


async def count_tokens(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await bodies.read(exchange, CountBody)
    ask = body.ask()
    who = caller.ask(exchange, body.model, body)
    async with exchange.while_connected(), runtime.job(who) as job:
        prepared, headers = await prepared_of(runtime, job, ask, body)
        tokens = await job.count(prepared.segments)
        await exchange.answer_json({"input_tokens": len(tokens)}, headers=headers)
