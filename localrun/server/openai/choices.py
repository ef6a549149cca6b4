"""The concurrent jobs of one request: the answers to `n` and to several prompts, as one sequence of deltas.

Runs in the request's task. One job, the usual case, is iterated as it is; several are waited for together.

Does not: start or end jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from localrun.server.jobs.job import Job
from localrun.wire import Delta


async def deltas(jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Delta, bool], None]:
    """(index of the job, its delta, whether more can follow without waiting), until every job has ended.

    Raises what any job's iteration raises.
    """
    if len(jobs) == 1:
        job = jobs[0]
        async for delta in job:
            yield 0, delta, job.has_ready
        return
    waiting = {asyncio.ensure_future(job.__anext__()): index for index, job in enumerate(jobs)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            n_left = len(done)
            for task in done:
                index, delta = waiting.pop(task), task.result()
                n_left -= 1
                if delta.finish is None:
                    waiting[asyncio.ensure_future(jobs[index].__anext__())] = index
                yield index, delta, n_left > 0
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
