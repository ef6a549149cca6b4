"""Fitting a prompt into the context, by the rules of Ollama's `/api`.

A chat loses its oldest messages, never the system messages, the last user's message and the last one, until the rest
fits with room for an answer. First whole turns go, so that what then begins, after the system messages, is a user's
message wherever there is one, because many templates refuse anything else; then the oldest calls of the last turn, each
with its results. A plain prompt, and what is too long even so, lose tokens: the first `num_keep` stay, and as many of
the last as fit.

Pure, but for asking how long a rendered conversation is. Does not: apply to `/v1`, where too long is an error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from localrun.server.prompting.ask import Message

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
) -> tuple[Tokens, Sequence[Message]]:
    """The longest part of a chat that fits: its tokens, and its messages.

    Asks for the whole first, then by bisection: a conversation of a hundred messages costs eight renderings, not a
    hundred. The result may still be over `limit` when even the shortest part is.
    """
    tokens = await tokens_of(messages)
    best, kept = tokens, messages
    cuts = _cuts(messages) if len(tokens) > limit else []
    low, high = 0, len(cuts) - 1
    while low <= high:
        middle = (low + high) // 2
        part = cuts[middle].applied(messages)
        tokens = await tokens_of(part)
        if len(tokens) <= limit:
            best, kept = tokens, part
            high = middle - 1
        else:
            if len(best) > limit:
                best, kept = tokens, part
            low = middle + 1
    return best, kept


class _Cut(NamedTuple):
    """Of the messages before `start` only the system's and the `question` stay."""

    start: int
    question: int | None = None

    def applied(self, messages: Sequence[Message]) -> list[Message]:
        return [
            message
            for index, message in enumerate(messages)
            if index >= self.start or index == self.question or message["role"] == "system"
        ]


def _cuts(messages: Sequence[Message]) -> list[_Cut]:
    """What may be cut, what leaves most first."""
    others = [index for index, message in enumerate(messages) if message["role"] != "system"]
    questions = [index for index in others if messages[index]["role"] == "user"]
    if not questions:
        return [_Cut(len(messages) - 1)] if others and others[0] < len(messages) - 1 else []
    # A tool's result without the call that it answers would stand for nothing: calls and results go together.
    answers = [index for index in others if index > questions[-1] and messages[index]["role"] == "assistant"]
    turns = [_Cut(index) for index in questions if index > others[0]]
    return turns + [_Cut(index, questions[-1]) for index in answers[1:]]
