"""What was asked of an engine, and what it answered so far: all that another engine needs to go on.

Pure. Owner: the job, from `ask` to its end. Bounded by the request and the context: a number for each token.
Does not: hold the text, which the client has, or talk to an engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from localrun import wire
from localrun.server.jobs.registry import RequestRecord


class Transcript:
    """See the module. `record` is the request's."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._message: wire.Submit | wire.Embed | None = None
        self._output: list[int] = []
        self._mu: float | None = None
        self._started_at_s: float | None = None
        self._vectors_of: Sequence[int] = ()  # the inputs that were asked for last
        self._done: dict[int, int] = {}  # inputs with a vector, and their tokens

    @property
    def has_begun(self) -> bool:
        """Whether it got a slot, on any engine."""
        return self._started_at_s is not None

    @property
    def message(self) -> wire.Submit | wire.Embed:
        """What was asked of the first engine."""
        assert self._message is not None
        return self._message

    @property
    def n_output(self) -> int:
        return len(self._output)

    def ask(self, message: wire.Submit | wire.Embed) -> None:
        """The first message, to the first engine."""
        self._message = message
        if isinstance(message, wire.Embed):
            self._vectors_of = range(len(message.inputs))

    def start(self, started: wire.Started) -> None:
        """It got a slot; the first time counts."""
        if self._started_at_s is None:
            self._started_at_s = started.at_s

    def take(self, delta: wire.Delta) -> None:
        """Takes an answer in, and numbers its vectors as the inputs were first asked for."""
        if delta.tokens:
            self._output += delta.tokens
            self._mu = delta.mu
        if delta.vectors:
            delta.vectors = [self._numbered(vector) for vector in delta.vectors]

    def rest(self, request_id: int) -> wire.Submit | wire.Embed:
        """What was asked, with what was said to it."""
        message, record = self._message, self._record
        assert message is not None
        resume = wire.Resume(
            output=tuple(self._output),
            n_cached=sum(self._done.values()) if isinstance(message, wire.Embed) else record.n_cached or 0,
            started_at_s=self._started_at_s,
            first_token_at_s=record.first_token_at_s,
            last_token_at_s=record.last_token_at_s,
            mu=self._mu,
        )
        if isinstance(message, wire.Submit):
            return msgspec.structs.replace(message, id=request_id, resume=resume)
        self._vectors_of = [index for index in range(len(message.inputs)) if index not in self._done]
        left = tuple(message.inputs[index] for index in self._vectors_of)
        return msgspec.structs.replace(message, id=request_id, inputs=left, resume=resume)

    def cancelled(self, now_s: float) -> wire.Delta:
        """The end of one that was cancelled while it was with no engine."""
        record, message = self._record, self._message
        if message is None:
            usage = wire.Usage(n_prompt=0, n_cached=0, n_output=0, queued_s=0.0, prefill_s=0.0, decode_s=0.0)
        else:
            started = self._started_at_s if self._started_at_s is not None else now_s
            first = record.first_token_at_s if record.first_token_at_s is not None else now_s
            usage = wire.Usage(
                n_prompt=record.n_prompt or 0,
                n_cached=record.n_cached or 0,
                n_output=record.n_output,
                queued_s=max(0.0, started - message.arrived_at_s),
                prefill_s=max(0.0, first - started),
                decode_s=max(0.0, (record.last_token_at_s or first) - first),
            )
        return wire.Delta(
            id=0,
            phase=wire.Phase.DONE,
            n_computed=0,
            n_output=record.n_output,
            finish=wire.Finish.CANCELLED,
            usage=usage,
        )

    def _numbered(self, vector: wire.Vector) -> wire.Vector:
        index = self._vectors_of[vector.index]
        self._done[index] = vector.n_tokens
        return msgspec.structs.replace(vector, index=index)
