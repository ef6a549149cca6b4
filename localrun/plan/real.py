"""The same requests against a real daemon, through the load generator of `localrun bench`.

Answers are as long as in the simulation, and nothing is drafted. A later turn repeats what was asked, but in place of
the model's answer it says something else of the same length, and so does a simulation of it (`as_sent`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from localrun.bench.results import Options, StreamRecord, Target
from localrun.bench.streams import Endpoint, numbers
from localrun.plan.workload import ANSWER, Session

_SAID = ".said"


def as_sent(sessions: Sequence[Session]) -> list[Session]:
    """The sessions, with answers in prompts that are not the model's own."""
    return [
        session._replace(
            turns=tuple(
                turn._replace(parts=tuple((name.replace(ANSWER, _SAID), n_tokens) for name, n_tokens in turn.parts))
                for turn in session.turns
            )
        )
        for session in sessions
    ]


def send(target: Target, sessions: Sequence[Session], rate_per_s: float, seed: int) -> list[StreamRecord]:
    """Let them arrive, and wait for all answers. Raises DaemonUnreachable, and LocalrunError for a target that refuses
    the first small request."""
    return asyncio.run(_send(target, sessions, rate_per_s, seed))


async def _send(target: Target, sessions: Sequence[Session], rate_per_s: float, seed: int) -> list[StreamRecord]:
    endpoint = Endpoint(target, Options(seed=seed))
    await endpoint.connect()
    texts = {
        name: numbers(seed, name, n_tokens)
        for session in sessions
        for turn in session.turns
        for name, n_tokens in turn.parts
    }
    start_s = time.perf_counter()

    async def talk(session: Session) -> None:
        at_s = start_s + session.at / rate_per_s
        for turn in session.turns:
            await asyncio.sleep(max(0.0, at_s + turn.think_s - time.perf_counter()))
            prompt = endpoint.wording.prompt([number for name, _ in turn.parts for number in texts[name]])
            body = {"prompt": prompt, "max_tokens": turn.n_output, "temperature": 0, "ignore_eos": True}
            record = await endpoint.ask({**body, "speculation": False}, group="")
            record.intended_at_s, record.client = at_s + turn.think_s, turn.client
            at_s = record.ended_at_s or time.perf_counter()

    await asyncio.gather(*map(talk, sessions))
    return sorted(endpoint.records, key=lambda record: record.intended_at_s)
