"""POST /api/chat.

The conversation goes through the model's chat template, and what the model writes through the parser of its format; a
conversation that is too long loses its oldest messages (see `truncation.py`), unless `truncate` is false. No messages
at all is a request to load the model, or with `keep_alive` 0 to unload it.
"""

from __future__ import annotations

import msgspec

from localrun.server.http import bodies, caller
from localrun.server.http.exchange import Exchange
from localrun.server.ollama import fitting, generation, loading
from localrun.server.ollama.chat_body import ChatBody
from localrun.server.ollama.lines import Kind, Lines
from localrun.server.ollama.options import Options
from localrun.server.prompting.conversation import begun
from localrun.server.runtime import Runtime


async def chat(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await bodies.read(exchange, ChatBody)
    ask = body.ask()
    who = caller.ask(exchange, body.model, body)
    lines = Lines(body.model, Kind.CHAT)
    async with exchange.while_connected():
        if not ask.messages:
            await loading.load_or_unload(runtime, exchange, who, lines)
            return
        async with runtime.job(who) as job:
            options = (body.options or Options()).over(job.model)
            ask = msgspec.structs.replace(ask, messages=begun(job.model, ask.messages))
            ask = await fitting.thinks_by_default(job, ask)
            fitted = await fitting.fit_chat(runtime, job, ask, options, may_cut=body.truncate is not False)
            await generation.answer(exchange, job, body, options, fitted, lines)
