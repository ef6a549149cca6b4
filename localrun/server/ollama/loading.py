"""Ollama's way to load and unload a model: a generate or chat request with nothing to say.

Does not: decide what fits or who must go (the supervisor does).
"""

from __future__ import annotations

from localrun.server.http.exchange import Exchange
from localrun.server.jobs.job import Ask
from localrun.server.ollama.lines import Lines
from localrun.server.runtime import Runtime


async def load_or_unload(runtime: Runtime, exchange: Exchange, ask: Ask, lines: Lines) -> None:
    """Loads the model and answers when it is there; with `keep_alive_s` 0 unloads it. Raises what loading raises."""
    if ask.keep_alive_s == 0:
        await runtime.supervisor.unload(ask.model)
        await exchange.answer(lines.end("unload", {}))
        return
    async with runtime.job(ask):
        pass
    await exchange.answer(lines.end("load", {}))
