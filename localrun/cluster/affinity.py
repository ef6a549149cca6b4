"""Which replica computes a prompt: the one that has least to do for it, what it knows of the prompt taken off.

A prompt is cut in blocks of `BLOCK_BYTES`, and each has the digest of everything up to its end, so that two prompts
have as many digests in common as they have blocks. What a replica would have to compute before the first token is what
waits there and what it does not know of the prompt, both in tokens; what it was given lately beyond its share counts
as if it waited, or a quiet cluster would leave all of a shared prompt to one. Among those for which that is about the
same the first block decides (rendezvous hashing): doors that have not seen the prompt choose alike without talking, and
when a replica goes only its share moves. So conversations stay where they are, and a prompt that many ask for spreads
as soon as waiting costs more than computing it again.

Pure, and without imports of localrun: it is taken to other processes by value, and simulated.
Does not: know what replicas have evicted.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

BLOCK_BYTES = 256
MAX_BLOCKS = 64
MAX_BYTES = MAX_BLOCKS * BLOCK_BYTES
# Of text; what the difference costs is a rounder choice.
BYTES_PER_TOKEN = 4
BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN
# Replicas with about as much to do: a prompt of eight blocks is worth as much.
SLACK_TOKENS = 8 * BLOCK_TOKENS
# How much of what was given counts after the next prompt was given to somebody: a memory of some fifty prompts.
KEPT_SHARE = 0.98
# Digests that are remembered; each is 16 bytes and a dictionary's entry.
MAX_DIGESTS = 200_000

Digest = bytes
DIGEST_BYTES = 8
# Tokens that a replica would have to compute before a prompt's first one, and how many of its blocks it knows.
Cost = tuple[float, int]


def blocks(pieces: Iterable[bytes], *, realm: bytes = b"") -> tuple[Digest, ...]:
    """The digests of a prompt that comes in pieces, the first `MAX_BLOCKS` whole blocks of it, or one of what there is.
    Prompts of different realms (API keys that share nothing, adapters) have none in common."""
    text = bytearray()
    for piece in pieces:
        text += piece
        if len(text) >= MAX_BYTES:
            break
    chained, found = hashlib.blake2b(realm, digest_size=DIGEST_BYTES).digest(), []
    for at in range(0, min(len(text), MAX_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chained = hashlib.blake2b(text[at : at + BLOCK_BYTES], key=chained, digest_size=DIGEST_BYTES).digest()
        found.append(chained)
    return tuple(found) or (hashlib.blake2b(text, key=chained, digest_size=DIGEST_BYTES).digest(),)


class Affinity:
    """Who has computed what, as far as this door has seen, and who is to compute the next prompt."""

    def __init__(self, *, max_digests: int = MAX_DIGESTS) -> None:
        self._max_digests = max_digests
        self._holders: OrderedDict[Digest, set[str]] = OrderedDict()  # oldest use first
        self._given_tokens: dict[str, float] = {}  # lately

    def __len__(self) -> int:
        return len(self._holders)

    def choose(self, prompt: Sequence[Digest], waiting_tokens: Mapping[str, float]) -> str:
        """One of the replicas in `waiting_tokens`, which says how much each has still to compute before it would come
        to this prompt. Raises ValueError without any."""
        return pick(prompt[0], self.costs(prompt, waiting_tokens))

    def costs(self, prompt: Sequence[Digest], waiting_tokens: Mapping[str, float]) -> dict[str, Cost]:
        """What the prompt costs at each of them."""
        known = self._depths(prompt, waiting_tokens)
        given = {replica: self._given_tokens.get(replica, 0.0) for replica in waiting_tokens}
        share = sum(given.values()) / max(1, len(given))
        return {
            replica: (
                waits + given[replica] - share + BLOCK_TOKENS * (len(prompt) - known.get(replica, 0)),
                known.get(replica, 0),
            )
            for replica, waits in waiting_tokens.items()
        }

    def note(self, prompt: Sequence[Digest], replica: str) -> None:
        """That one has computed this prompt, or is about to. Blocks that are noted later, of the answer or after a
        prompt's own, count as given then."""
        n_new = 0
        for digest in prompt:
            holders = self._holders.setdefault(digest, set())
            n_new += replica not in holders
            holders.add(replica)
            self._holders.move_to_end(digest)
        self._given_tokens = {name: tokens * KEPT_SHARE for name, tokens in self._given_tokens.items()}
        self._given_tokens[replica] = self._given_tokens.get(replica, 0.0) + BLOCK_TOKENS * n_new
        self._trim()

    def hear(self, replica: str, digests: Iterable[Digest]) -> None:
        """That one has computed these, whoever asked it to."""
        for digest in digests:
            self._holders.setdefault(digest, set()).add(replica)
        self._trim()

    def _trim(self) -> None:
        while len(self._holders) > self._max_digests:
            self._holders.popitem(last=False)

    def forget(self, replica: str) -> None:
        """That one is gone, or has forgotten."""
        self._given_tokens.pop(replica, None)
        for digest in [digest for digest, holders in self._holders.items() if replica in holders]:
            self._holders[digest].discard(replica)
            if not self._holders[digest]:
                del self._holders[digest]

    def _depths(self, prompt: Sequence[Digest], replicas: Mapping[str, float]) -> dict[str, int]:
        """How many blocks from the first on each of them knows."""
        depths: dict[str, int] = {}
        for depth, digest in enumerate(prompt, 1):
            holders = self._holders.get(digest, set())
            further = [replica for replica in holders if replica in replicas and depths.get(replica, 0) == depth - 1]
            if not further:
                break
            for replica in further:
                depths[replica] = depth
        return depths


def pick(first: Digest, costs: Mapping[str, Cost]) -> str:
    """Who computes a prompt that begins with this block. Raises ValueError without anybody."""
    if not costs:
        raise ValueError("no replica to choose from")
    limit = min(tokens for tokens, _ in costs.values()) + SLACK_TOKENS
    deepest = max(depth for _, depth in costs.values())
    close = [replica for replica, (tokens, depth) in costs.items() if tokens <= limit and depth == deepest]
    # Whoever knows most may have too much to do.
    close = close or [replica for replica, (tokens, _) in costs.items() if tokens <= limit]
    return max(
        close, key=lambda replica: hashlib.blake2b(replica.encode(), key=first, digest_size=DIGEST_BYTES).digest()
    )
