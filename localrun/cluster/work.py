"""A request as what there is to compute, for doors and replicas alike: its prompt in digests, and how much of it is
left before the first token, which follows from what was asked until it has a slot, and then from what the engine says.

Pure.
"""

from __future__ import annotations

from localrun import wire
from localrun.cluster.affinity import BLOCK_TOKENS, BYTES_PER_TOKEN, MAX_BYTES, Digest, blocks

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
