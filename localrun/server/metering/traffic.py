"""Requests that have ended, for whoever records what this daemon is asked (`localrun plan record`).

A row has lengths, times, and digests by which one sees what prompts have in common: each block of a prompt, and of the
answer behind it, has the digest of everything up to its end. They are keyed with a salt that is drawn for each listener
and kept by nobody, so that they say nothing by themselves, and nothing beside another recording. A listener who also
sends requests can still test a guess: equal texts have equal digests. That is why the right of an admin is asked for,
and why `plan record`, which sees at the end how many clients share a beginning, writes none of them down.

Runs in the daemon's event loop, and costs nothing while nobody listens: else the engine makes tokens of each prompt
once more, beside its steps.
Does not: keep rows, or any text.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Sequence
from itertools import takewhile

from localrun import wire
from localrun.errors import LocalrunError
from localrun.server.engines.resident import Link
from localrun.server.jobs.generation import Generation
from localrun.snapshot import TrafficRow

# Fewer tokens than that are never taken from the cache.
BLOCK_TOKENS = 16
# Rows that a listener may leave unread; more are lost.
MAX_UNREAD = 10_000
_DIGEST_BYTES = 8


class Listener:
    """What ends from now on, as `rows`."""

    def __init__(self) -> None:
        self.rows: asyncio.Queue[TrafficRow] = asyncio.Queue(MAX_UNREAD)
        self._salt = secrets.token_bytes(32)
        self._began_s = time.monotonic()

    def tell(self, record: Generation, message: wire.Submit, prompt: Sequence[int], answer: Sequence[int]) -> None:
        if record.arrived_at_s < self._began_s or not record.n_prompt or not record.n_output or self.rows.full():
            return
        is_whole = len(prompt) == record.n_prompt
        digests = self._digests(message, [*prompt, *answer] if is_whole else prompt)
        row = TrafficRow(
            at_s=record.arrived_at_s - self._began_s,
            model=record.engine,
            client=self._client(record),
            lane=record.lane.value,
            target_itl_s=message.target_itl_s,
            prompt_tokens=record.n_prompt,
            cached_tokens=record.n_cached or 0,
            output_tokens=record.n_output,
            blocks=digests,
        )
        self.rows.put_nowait(row)

    def _digests(self, message: wire.Submit, tokens: Sequence[int]) -> list[str]:
        """Of whole blocks. Prompts that share nothing in the engine have none in common."""
        realm = message.namespace + b"".join(each.digest for each in message.adapters or ())
        chained, found = self._digest(b"realm", realm), []
        for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + BLOCK_TOKENS])
            chained = self._digest(chained.encode(), block)
            found.append(chained)
        return found

    def _client(self, record: Generation) -> str:
        """A client may call itself what it likes, and is still none that has a key of that name."""
        kind, name = (b"key", record.key) if record.key else (b"client", record.client)
        return self._digest(kind, name.encode("utf-8", "replace"))

    def _digest(self, before: bytes, content: bytes) -> str:
        return hashlib.blake2b(before + content, key=self._salt, digest_size=_DIGEST_BYTES).hexdigest()


class Traffic:
    """See the module. Jobs tell it of their ends while there are `listeners`, before their records forget what was
    asked."""

    def __init__(self) -> None:
        self.listeners: set[Listener] = set()
        self._telling: set[asyncio.Task[None]] = set()

    def listen(self) -> Listener:
        listener = Listener()
        self.listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        self.listeners.discard(listener)

    def ends(self, record: Generation, link: Link | None) -> None:
        """A record is about to become final; `link` is what computed it."""
        if link is not None and isinstance(record.message, wire.Submit):
            task = asyncio.create_task(self._tell(record, link, record.message, record.output))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self, record: Generation, link: Link, message: wire.Submit, answer: Sequence[int]) -> None:
        prompt = message.tokens
        if prompt is None:
            # Pictures and sound have no tokens before they are read.
            told = tuple(takewhile(lambda segment: segment.media is None, message.segments))
            try:
                prompt = (await link.count(told)).tokens
            except LocalrunError:  # the engine is gone: nothing is known but lengths
                prompt = ()
        for listener in self.listeners:
            listener.tell(record, message, prompt, answer)
