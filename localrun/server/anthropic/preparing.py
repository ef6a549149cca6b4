"""From a body to a prompt on a loaded model: what creating and counting have in common.

Does not: submit.
"""

from __future__ import annotations

import asyncio

import msgspec

from localrun.server.anthropic.body import CountBody
from localrun.server.anthropic.field_names import naming
from localrun.server.http.failures import Headers
from localrun.server.jobs.job import Job
from localrun.server.prompting.ask import ChatAsk
from localrun.server.prompting.conversation import begun
from localrun.server.prompting.prepare import Prepared, prepare
from localrun.server.prompting.profile import capabilities
from localrun.server.runtime import Runtime

_IGNORED: Headers = [(b"x-localrun-ignored", b"thinking")]


async def prepared_of(runtime: Runtime, job: Job, ask: ChatAsk, body: CountBody) -> tuple[Prepared, Headers]:
    """The prompt, and headers of the answer to it. Raises what `prepare` raises.

    Clients set for Claude ask every model to think. One that cannot answers all the same, and a header says so.
    """
    headers: Headers = []
    if ask.think and "thinking" not in await asyncio.to_thread(capabilities, job.model):
        ask = msgspec.structs.replace(ask, think=None)
        headers = _IGNORED
    ask = msgspec.structs.replace(ask, messages=begun(job.model, ask.messages))
    with naming():
        return await prepare(runtime, job, ask), headers
