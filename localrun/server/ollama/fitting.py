"""Prompts that fit into the context: how long they are is asked of the engine only where it may matter.

Runs in the task of the request. What goes, and in which order, is in `truncation.py`.

Does not: make templates' prompts (`replies/prepare.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from localrun.server.jobs.job import Job
from localrun.server.ollama import truncation
from localrun.server.ollama.options import Options
from localrun.server.ollama.truncation import Tokens
from localrun.server.parsing.pieces import PlainParser
from localrun.server.prompting.ask import ChatAsk, Message
from localrun.server.prompting.infill import infill
from localrun.server.prompting.prepare import Prepared, prepare
from localrun.server.prompting.profile import capabilities
from localrun.server.runtime import Runtime
from localrun.wire import Grammar, Segment

__all__ = ["Fitted", "Tokens", "fit_chat", "fit_infill", "fit_tokens", "plain"]

# Of a text that is to be cut by its characters: each round comes closer, and a little less is taken than is allowed.
_ROUNDS = 8
_MARGIN = 0.95


class Fitted(msgspec.Struct, frozen=True):
    """A prompt for the engine: the segments of `prepared`, or `tokens` where they had to be counted. `n_cut` messages
    are gone, or that many tokens where no message could go."""

    prepared: Prepared
    tokens: Tokens | None = None
    n_cut: int = 0


def plain(segments: Sequence[Segment], grammar: Grammar | None) -> Prepared:
    """A prompt without a chat template, whose answer is text and nothing else."""
    return Prepared(tuple(segments), grammar, show_control=False, stop=(), new_parser=PlainParser)


async def thinks_by_default(job: Job, ask: ChatAsk) -> ChatAsk:
    """As Ollama has it: a model that can think does, unless it is told not to."""
    if ask.think is not None or ask.template is not None:
        return ask
    # Reads the model's file when it is asked of for the first time.
    known = await asyncio.to_thread(capabilities, job.model)
    return msgspec.structs.replace(ask, think=True) if "thinking" in known else ask


async def fit_chat(runtime: Runtime, job: Job, ask: ChatAsk, options: Options, *, may_cut: bool) -> Fitted:
    """A conversation that may lose its oldest messages. Raises what `prepare` raises."""
    prepared = await prepare(runtime, job, ask)
    limit = truncation.limit_tokens(job.n_ctx, options.n_predict)
    # No tokenizer makes more tokens than bytes, but for a BOS and a leading space: most chats need no count.
    if not may_cut or sum(len(segment.text.encode()) for segment in prepared.segments) + 8 <= limit:
        return Fitted(prepared)

    async def tokens_of(part: Sequence[Message]) -> Tokens:
        if part is ask.messages:
            return await job.count(prepared.segments)
        shorter = await prepare(runtime, job, msgspec.structs.replace(ask, messages=part))
        return await job.count(shorter.segments)

    tokens, kept = await truncation.cut_messages(ask.messages, tokens_of, limit=limit)
    n_cut = len(ask.messages) - len(kept)
    if n_cut:
        prepared = await prepare(runtime, job, msgspec.structs.replace(ask, messages=kept))
    fitting = truncation.cut_tokens(tokens, limit=limit, n_keep=options.n_keep)
    return Fitted(prepared, fitting, n_cut or len(tokens) - len(fitting))


def fit_tokens(job: Job, prepared: Prepared, tokens: Tokens, options: Options, *, may_cut: bool) -> Fitted:
    """A prompt that may lose tokens after its first ones."""
    limit = truncation.limit_tokens(job.n_ctx, options.n_predict)
    kept = truncation.cut_tokens(tokens, limit=limit, n_keep=options.n_keep) if may_cut else tokens
    return Fitted(prepared, kept, len(tokens) - len(kept))


async def fit_infill(
    job: Job, prefix: str, suffix: str, grammar: Grammar | None, options: Options, *, may_cut: bool
) -> Fitted:
    """A prompt to fill in the middle, which may lose what is farthest from there. Raises BadRequest for a model that
    cannot."""
    limit = truncation.limit_tokens(job.n_ctx, options.n_predict)
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
