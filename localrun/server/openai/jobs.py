"""The jobs behind one request to `/v1`: as many as it has answers, on one model.

Does not: submit them (each route has its own prompts).
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec

from localrun.server.http import caller, keep_alive
from localrun.server.http.exchange import Exchange
from localrun.server.http.fields import ServiceFields
from localrun.server.jobs.job import Job
from localrun.server.runtime import Runtime
from localrun.wire import Sampling


async def enter(
    runtime: Runtime,
    exchange: Exchange,
    stack: AsyncExitStack,
    *,
    model: str,
    keep_alive_value: float | str | None,
    fields: ServiceFields,
    n_jobs: int,
) -> list[Job]:
    """`n_jobs` jobs, entered on `stack`: the first waits for the model, the others find it loaded."""
    ask = caller.ask(exchange, model, keep_alive_s=keep_alive.seconds(keep_alive_value), fields=fields)
    return [await stack.enter_async_context(runtime.job(ask)) for _ in range(n_jobs)]


def for_choice(sampling: Sampling, index: int) -> Sampling:
    """Parameters of one of several answers to a prompt: with one seed for all, all would be the same."""
    if sampling.seed is None or index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + index)


def answer_id(jobs: list[Job]) -> str:
    """What the answer's id is made of."""
    return jobs[0].id.removeprefix("req_")
