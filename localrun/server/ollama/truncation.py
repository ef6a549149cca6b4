"""Fitting a prompt into the context, by the rules of Ollama's `/api`.

A chat loses its oldest messages, never the system messages and never the last user's message with what follows it,
until the rest fits with room for an answer; what then begins, after the system messages, is a user's message wherever
there is one, because many templates refuse anything else. A plain prompt, and what is too long even so, lose tokens:
the first `num_keep` stay, and as many of the last as fit.

Pure, but for asking how long a rendered conversation is. Does not: apply to `/v1`, where too long is an error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from localrun.server.jobs.prompt import Message

ROOM_TOKENS = 256

Tokens = tuple[int, ...]


def limit_tokens(n_ctx: int, n_predict: int) -> int:
    """The longest prompt that leaves room for an answer: for all of it if its length is known, else for
    `ROOM_TOKENS`, and never more than a quarter of the context."""
    wanted = n_predict if n_predict > 0 else ROOM_TOKENS
    return n_ctx - max(1, min(wanted, n_ctx // 4))


def cut_tokens(tokens: Tokens, *, limit: int, n_keep: int) -> Tokens:
    """At most `limit` tokens: the first `n_keep` (at least one, which is BOS for most models) and the last ones."""
    if len(tokens) <= limit:
        return tokens
    head = len(tokens) if n_keep < 0 else max(1, n_keep)
    head = min(head, limit // 2)
    return tokens[:head] + tokens[len(tokens) - (limit - head) :]


async def cut_messages(
    messages: Sequence[Message], tokens_of: Callable[[Sequence[Message]], Awaitable[Tokens]], *, limit: int
) -> tuple[Tokens, int]:
    """The tokens of the longest part of a chat that fits, and how many messages were left out.

    Asks for the whole first, then by bisection: a conversation of a hundred messages costs eight renderings, not a
    hundred. The result may still be over `limit` when even the shortest part is.
    """
    tokens = await tokens_of(messages)
    if len(tokens) <= limit:
        return tokens, 0
    cuts = _cuts(messages)
    best, n_left_out = tokens, 0
    low, high = 0, len(cuts) - 1
    while low <= high:
        middle = (low + high) // 2
        tokens = await tokens_of(without_oldest(messages, cuts[middle]))
        if len(tokens) <= limit:
            best, n_left_out = tokens, cuts[middle]
            high = middle - 1
        else:
            if len(best) > limit:
                best, n_left_out = tokens, cuts[middle]
            low = middle + 1
    return best, n_left_out


def _cuts(messages: Sequence[Message]) -> list[int]:
    """How many of the oldest messages may go, ascending, 0 not among them."""
    droppable = [index for index, message in enumerate(messages[:-1]) if message["role"] != "system"]
    first_kept = [*droppable[1:], len(messages) - 1] if droppable else []
    has_question = any(message["role"] == "user" for message in messages)
    return [
        n_dropped
        for n_dropped, index in enumerate(first_kept, start=1)
        # A tool's result without the call that it answers would stand for nothing.
        if messages[index]["role"] == "user" or (n_dropped == len(droppable) and not has_question)
    ]


def without_oldest(messages: Sequence[Message], n_dropped: int) -> list[Message]:
    """What is left when that many of the oldest go that are no system messages."""
    kept = []
    for index, message in enumerate(messages):
        if n_dropped and message["role"] != "system" and index < len(messages) - 1:
            n_dropped -= 1
        else:
            kept.append(message)
    return kept
