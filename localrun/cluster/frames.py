"""What a door and a replica say to each other: the engine's messages, and a few about the connection itself; and what
both make of a request: its prompt in digests, and how much there is to compute before its first token.

The frames are those of the pipes (`framing.py`), over TCP. Two machines have two clocks, so what is a time in `wire.py`
travels as an age: the sender subtracts its clock (`aged`), the receiver adds its own (`dated`).

The first frame is the door's `Hello`, the second the replica's `Welcome` or `Refused`. From then on both say something
at least every `BEAT_S`, and whoever hears nothing for `SILENCE_S` takes the other for lost: a machine without power and
a process that hangs close no connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import msgspec

from localrun import framing, wire
from localrun.cluster.affinity import BLOCK_TOKENS, BYTES_PER_TOKEN, MAX_BYTES, Digest, blocks
from localrun.server.engines.link import End

PROTOCOL = 2
BEAT_S = 1.0
SILENCE_S = 3.0

_Message = TypeVar("_Message")


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Who comes, and what for: `app` is the fingerprint of what it takes the replica to compute, `version` localrun's.
    `token` is the cluster's secret for frames."""

    protocol: int
    version: str
    token: bytes
    app: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Still here."""


class Bytes(msgspec.Struct, frozen=True, kw_only=True, tag="bytes"):
    """The next bytes of a picture or a recording, before the first request that has it. The replica keeps them for this
    connection until it is told to `Forget` them."""

    digest: bytes
    data: bytes
    is_last: bool


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """A picture or a recording that is not kept any longer than requests need it that have come."""

    digest: bytes


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    ready: wire.Ready


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The connection ends with it. `code` is one of `errors.py`."""

    code: str
    message: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The replica's engine is gone, and so is the connection."""

    end: End


ToReplica = Hello | Beat | Bytes | Forget | wire.Submit | wire.Embed | wire.Cancel | wire.Count | wire.ClearCache
FromReplica = Welcome | Refused | Ended | Beat | wire.Counted | wire.Cleared | wire.Step

_to_replica: msgspec.msgpack.Decoder[ToReplica] = msgspec.msgpack.Decoder(ToReplica)
_from_replica: msgspec.msgpack.Decoder[FromReplica] = msgspec.msgpack.Decoder(FromReplica)


def aged(message: _Message, now_s: float) -> _Message:
    """A message as it travels: with ages, which are negative."""
    return _shifted(message, -now_s)


def decode_to_replica(body: bytes, now_s: float) -> ToReplica:
    """A door's message, with times of this machine's clock. Raises framing.FrameError."""
    return _shifted(framing.decoded(_to_replica, body), now_s)


def decode_from_replica(body: bytes, now_s: float) -> FromReplica:
    """A replica's message, with times of this machine's clock. Raises framing.FrameError."""
    return _shifted(framing.decoded(_from_replica, body), now_s)


def with_media(message: _Message, change: Callable[[wire.Media], wire.Media]) -> _Message:
    """The message with something else in place of each of its pictures and recordings."""
    replace = msgspec.structs.replace

    def changed(segments: tuple[wire.Segment, ...]) -> tuple[wire.Segment, ...]:
        return tuple(one if one.media is None else replace(one, media=change(one.media)) for one in segments)

    if isinstance(message, wire.Embed):
        inputs = (
            replace(one, segments=changed(one.segments)) if isinstance(one, wire.Mixed) else one
            for one in message.inputs
        )
        return cast("_Message", replace(message, inputs=tuple(inputs)))
    if isinstance(message, wire.Submit | wire.Count) and any(one.media is not None for one in message.segments):
        return cast("_Message", replace(message, segments=changed(message.segments)))
    return message


def media_of(message: wire.Submit | wire.Embed | wire.Count) -> list[wire.Media]:
    found: list[wire.Media] = []

    def note(media: wire.Media) -> wire.Media:
        found.append(media)
        return media

    with_media(message, note)
    return found


def _shifted(message: _Message, by_s: float) -> _Message:
    replace = msgspec.structs.replace
    if isinstance(message, wire.Step):
        started = [replace(one, at_s=one.at_s + by_s) for one in message.started]
        return cast("_Message", replace(message, sent_at_s=message.sent_at_s + by_s, started=started))
    if isinstance(message, wire.Submit | wire.Embed):
        resume = message.resume
        if resume is not None:
            times = (resume.started_at_s, resume.first_token_at_s, resume.last_token_at_s)
            begun, first, last = (None if at_s is None else at_s + by_s for at_s in times)
            resume = replace(resume, started_at_s=begun, first_token_at_s=first, last_token_at_s=last)
        return cast("_Message", replace(message, arrived_at_s=message.arrived_at_s + by_s, resume=resume))
    return message


# --- a request as what there is to compute ---
# That follows from what was asked until it has a slot, and then from what the engine says.

# What an answer that is being written costs a prompt beside it.
RUNNING_TOKENS = BLOCK_TOKENS
# Pictures and sound become about as many rows.
MEDIA_TOKENS = 256


class Work:
    """`left_tokens` of one request."""

    def __init__(self, message: wire.Submit | wire.Embed) -> None:
        self.left_tokens = _n_tokens(message)
        self._n_prompt: int | None = None

    def on_started(self, started: wire.Started) -> None:
        self._n_prompt = started.n_prompt
        self.left_tokens = max(0, started.n_prompt - started.n_cached)

    def on_delta(self, delta: wire.Delta) -> None:
        if delta.phase in (wire.Phase.DECODE, wire.Phase.DONE):
            self.left_tokens = 0
        elif self._n_prompt is not None:
            self.left_tokens = min(self.left_tokens, max(0, self._n_prompt - delta.n_computed))


def _n_tokens(message: wire.Submit | wire.Embed) -> int:
    """As far as can be told without a vocabulary."""
    if isinstance(message, wire.Submit):
        n_output = 0 if message.resume is None else len(message.resume.output)
        if message.tokens is not None:
            return len(message.tokens) + n_output
        return sum(map(_of_segment, message.segments)) + n_output
    return sum(
        sum(map(_of_segment, each.segments))
        if isinstance(each, wire.Mixed)
        else len(each) // (BYTES_PER_TOKEN if isinstance(each, str) else 1)
        for each in message.inputs
    )


def _of_segment(segment: wire.Segment) -> int:
    return len(segment.tokens) + len(segment.text) // BYTES_PER_TOKEN + MEDIA_TOKENS * (segment.media is not None)


def prompt_of(message: wire.Submit | wire.Embed) -> tuple[Digest, ...]:
    """The digests that a replica is chosen by. Of media their own digest stands for them."""
    if isinstance(message, wire.Embed):
        return blocks([])
    pieces = (_bytes_of(segment) for segment in message.segments)
    if message.tokens is not None:
        pieces = (token.to_bytes(4, "little") for token in message.tokens)
    realm = message.namespace + b"".join(each.digest for each in message.adapters or ())
    return blocks(pieces, realm=realm)


def _bytes_of(segment: wire.Segment) -> bytes:
    """As much of it as can count."""
    if segment.media is not None:
        return segment.media.digest
    if segment.tokens:
        return b"".join(token.to_bytes(4, "little") for token in segment.tokens[:MAX_BYTES])
    return segment.text[:MAX_BYTES].encode("utf-8", "surrogatepass")
