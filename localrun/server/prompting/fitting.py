"""Prompts that fit into the context, by the rules of Ollama's `/api`, and for responses that ask for it
(`truncation`). All else of `/v1` refuses what is too long.

A chat loses its oldest messages, never the system messages, the last user's message and the last one, until the rest
fits with room for an answer. First whole turns go, so that what then begins, after the system messages, is a user's
message wherever there is one, because many templates refuse anything else; then the oldest calls of the last turn, each
with its results. A plain prompt, and what is too long even so, lose tokens: the first `num_keep` stay, and as many of
the last as fit. A prompt with pictures or sound loses whole messages only.

Runs in the task of the request. How long a prompt is the engine is asked only where it may matter.
Does not: make templates' prompts (`prompting/prepare.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from localrun.server.http.exchange import apart
from localrun.server.http.failures import Headers
from localrun.server.jobs.job import Job
from localrun.server.parsing.pieces import PlainParser
from localrun.server.prompting.ask import ChatRequest, Message
from localrun.server.prompting.prepare import Prepared, prepare
from localrun.server.prompting.segments import infill
from localrun.server.runtime import Runtime
from localrun.wire import Grammar, Segment, Submit

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
    cuts = await apart(_cuts, messages) if len(tokens) > limit else []
    low, high = 0, len(cuts) - 1
    while low <= high:
        middle = (low + high) // 2
        part = await apart(cuts[middle].applied, messages)
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


# Of a text that is to be cut by its characters: each round comes closer, and a little less is taken than is allowed.
_ROUNDS = 8
_MARGIN = 0.95


class Fitted(msgspec.Struct, frozen=True):
    """A prompt for the engine: the segments of `prepared`, or `tokens` where they had to be counted. `n_cut` messages
    are gone, or that many tokens where no message could go."""

    prepared: Prepared
    tokens: Tokens | None = None
    n_cut: int = 0

    @property
    def headers(self) -> Headers:
        """How many messages or tokens were left out, where any were."""
        return [(b"x-localrun-truncated", str(self.n_cut).encode("ascii"))] if self.n_cut else []

    async def submit(self, job: Job, asked: Submit) -> None:
        """Raises what the job's `submit` raises."""
        segments = () if self.tokens is not None else self.prepared.segments
        await job.submit(asked, segments=segments, tokens=self.tokens)


def plain(segments: Sequence[Segment], grammar: Grammar | None) -> Prepared:
    """A prompt without a chat template, whose answer is text and nothing else."""
    return Prepared(tuple(segments), grammar, show_control=False, stop=(), new_parser=PlainParser)


async def fit_chat(
    runtime: Runtime, job: Job, ask: ChatRequest, *, n_predict: int, n_keep: int, may_cut: bool
) -> Fitted:
    """A conversation that may lose its oldest messages, for an answer of `n_predict` tokens (-1 if nobody knows).
    Raises what `prepare` raises."""
    prepared = await prepare(runtime, job, ask)
    limit = limit_tokens(job.ready.n_ctx, n_predict)
    # No tokenizer makes more tokens than bytes, but for a BOS and a leading space: most chats need no count.
    n_bytes = sum(len(segment.text.encode()) for segment in prepared.segments)
    if not may_cut or (n_bytes + 8 <= limit and not ask.media):
        return Fitted(prepared)

    async def tokens_of(part: Sequence[Message]) -> Tokens:
        if part is ask.messages:
            return await job.count(prepared.segments)
        shorter = await prepare(runtime, job, msgspec.structs.replace(ask, messages=part))
        return await job.count(shorter.segments)

    tokens, kept = await cut_messages(ask.messages, tokens_of, limit=limit)
    n_cut = len(ask.messages) - len(kept)
    if n_cut:
        prepared = await prepare(runtime, job, msgspec.structs.replace(ask, messages=kept))
    if any(segment.media is not None for segment in prepared.segments):  # which token ids do not say
        return Fitted(prepared, n_cut=n_cut)
    fitting = cut_tokens(tokens, limit=limit, n_keep=n_keep)
    return Fitted(prepared, fitting, n_cut or len(tokens) - len(fitting))


def fit_tokens(job: Job, prepared: Prepared, tokens: Tokens, *, n_predict: int, n_keep: int, may_cut: bool) -> Fitted:
    """A prompt that may lose tokens after its first ones."""
    limit = limit_tokens(job.ready.n_ctx, n_predict)
    kept = cut_tokens(tokens, limit=limit, n_keep=n_keep) if may_cut else tokens
    return Fitted(prepared, kept, len(tokens) - len(kept))


async def fit_infill(
    job: Job, prefix: str, suffix: str, grammar: Grammar | None, *, n_predict: int, may_cut: bool
) -> Fitted:
    """A prompt to fill in the middle, which may lose what is farthest from there. Raises BadRequest for a model that
    cannot."""
    limit = limit_tokens(job.ready.n_ctx, n_predict)
    segments = infill(job.model.header, prefix, suffix)
    tokens = whole = await job.count(segments)
    for _ in range(_ROUNDS):
        if not may_cut or len(tokens) <= limit:
            break
        share = _MARGIN * limit / len(tokens)
        prefix, suffix = prefix[len(prefix) - int(share * len(prefix)) :], suffix[: int(share * len(suffix))]
        segments = infill(job.model.header, prefix, suffix)
        tokens = await job.count(segments)
    return Fitted(plain(segments, grammar), tokens, len(whole) - len(tokens))
