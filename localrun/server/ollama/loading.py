"""Ollama's way to load and unload a model: a generate or chat request with nothing to say.

Does not: decide what fits or who must go (the supervisor does).
"""

from __future__ import annotations

import time

from localrun.server.http.exchange import Exchange
from localrun.server.jobs.job import Ask
from localrun.server.ollama import lines as ollama_lines
from localrun.server.ollama.lines import Lines
from localrun.server.runtime import Runtime
from localrun.wire import Usage

_NOTHING = Usage(n_prompt=0, n_cached=0, n_output=0, queued_s=0.0, prefill_s=0.0, decode_s=0.0)


async def load_or_unload(runtime: Runtime, exchange: Exchange, ask: Ask, lines: Lines) -> None:
    """Loads the model and answers when it is there; with `keep_alive_s` 0 unloads it. Raises what loading raises."""
    if ask.keep_alive_s == 0:
        await runtime.supervisor.unload(ask.model)
        await exchange.answer(lines.end("unload", ollama_lines.metrics(_NOTHING, load_s=0.0, total_s=0.0)))
        return
    async with runtime.job(ask) as job:
        load_s, total_s = job.load_s, time.monotonic() - job.arrived_at_s
    await exchange.answer(lines.end("load", ollama_lines.metrics(_NOTHING, load_s=load_s, total_s=total_s)))
