"""The same requests against a real daemon, through the load generator of `localrun bench`.

Answers are as long as in the simulation. A later turn repeats what was asked, but in place of the model's answer it
says something else of the same length, and so does a simulation of it (`as_sent`). What was said is known afterwards
(`Sent.texts`), so that a simulation drafts what the daemon drafted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from localrun.bench.arrivals import ANSWER, Session
from localrun.bench.results import Options, StreamRecord, Target
from localrun.bench.streams import CLIENT, Endpoint, PromptForm, numbers, post_stream

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


class Sent(NamedTuple):
    """What came of requests, by when they were to be sent, and with drafts the tokens of all parts and answers."""

    records: list[StreamRecord]
    texts: dict[str, list[int]]


def send(
    target: Target, sessions: Sequence[Session], rate_per_s: float, seed: int, *, speculates: bool = False
) -> Sent:
    """Let them arrive, and wait for all answers. Raises DaemonUnreachable, and LocalrunError for a target that refuses
    the first small request."""
    return asyncio.run(_send(target, sessions, rate_per_s, seed, speculates=speculates))


async def _send(target: Target, sessions: Sequence[Session], rate_per_s: float, seed: int, *, speculates: bool) -> Sent:
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
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": turn.n_output, "temperature": 0, "ignore_eos": True}
            body |= {"lane": turn.lane, "speculation": speculates}
            if turn.target_itl_s:
                body["latency"] = 1000 * turn.target_itl_s
            name = turn.parts[-1][0] + ANSWER
            record = await endpoint.ask(body, group=name, client=turn.client or CLIENT)
            record.intended_at_s = at_s + turn.think_s
            at_s = record.ended_at_s or time.perf_counter()

    await asyncio.gather(*map(talk, sessions))
    records = sorted(endpoint.records, key=lambda record: record.intended_at_s)
    if not speculates or endpoint.wording is PromptForm.TEXT:
        return Sent(records, {})
    known = {name: [int(token) for token in endpoint.wording.prompt(of)] for name, of in texts.items()}
    return Sent(records, known | {record.group: await _tokens(target, record) for record in records})


async def _tokens(target: Target, record: StreamRecord) -> list[int]:
    """Of an answer: as many as it had."""
    read = bytearray()
    body = msgspec.json.encode({"content": record.text, "model": target.model})
    await post_stream(f"{target.base_url}/tokenize", body, lambda data, _now_s: read.extend(data))
    return msgspec.json.decode(bytes(read), type=dict[str, list[int]])["tokens"][: record.n_output]
