"""POST /tokenize, /detokenize and /apply-template: what a text is to the model, and the reverse. Nothing is generated;
the model is loaded for its vocabulary."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Annotated

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server.http import fields
from localrun.server.http.exchange import Exchange
from localrun.server.http.fields import ServiceFields, ask_of
from localrun.server.jobs.job import Job
from localrun.server.media.places import shown
from localrun.server.openai.answer import naming
from localrun.server.openai.chat import ChatBody
from localrun.server.openai.fim import loaded_model
from localrun.server.prompting.conversation import begun
from localrun.server.prompting.prepare import prepare
from localrun.server.runtime import Runtime
from localrun.wire import Segment

# A text, or texts and token ids one after the other.
Mixed = str | list[str | fields.TokenId]


class TokenizeBody(ServiceFields, frozen=True, kw_only=True):
    """POST /tokenize."""

    content: Mixed = ""
    model: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(ServiceFields, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: Annotated[list[fields.TokenId], Meta(min_length=0)] | None = None
    model: str | None = None


class TemplateBody(ChatBody, frozen=True, kw_only=True):
    """POST /apply-template."""

    model: Annotated[str, Meta(description="")] | None = None  # type: ignore[assignment]


class TokenPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A token and what it stands for: text, or bytes where these are a part of a character."""

    id: int
    piece: str | list[int]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a text; with `with_pieces` objects instead of numbers."""

    tokens: list[int | TokenPiece]


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The text of tokens. Bytes that are no whole character are U+FFFD."""

    content: str


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's chat template makes of a conversation."""

    prompt: str


async def tokenize(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await exchange.read_json(TokenizeBody)
    model = body.model or loaded_model(runtime)
    async with exchange.while_connected(), runtime.job(ask_of(exchange, model, body)) as job:
        segments = segments_of(body.content, job.n_vocab, field="content", trusted=body.parse_special)
        counted = await job.tokenize(segments, is_prompt=body.add_special, wants_pieces=body.with_pieces)
        answer = Tokenized(tokens=list(counted.tokens))
        if body.with_pieces:
            pairs = zip(counted.tokens, counted.pieces, strict=True)
            answer = Tokenized(tokens=[TokenPiece(id=token, piece=_piece(piece)) for token, piece in pairs])
        await exchange.answer_json(answer)


async def detokenize(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await exchange.read_json(DetokenizeBody)
    model = body.model or loaded_model(runtime)
    async with exchange.while_connected(), runtime.job(ask_of(exchange, model, body)) as job:
        await exchange.answer_json(Detokenized(content=await text_of(job, body.tokens or [], field="tokens")))


async def apply_template(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler. Pictures and sound are `[img-0]` and so on in the prompt."""
    body = await exchange.read_json(TemplateBody)
    body.check_supported()
    ask = body.ask()
    model = body.model or loaded_model(runtime)
    async with exchange.while_connected(), AsyncExitStack() as stack:
        if ask.media:
            await runtime.read_media(model, ask.media)
        job = await stack.enter_async_context(runtime.job(ask_of(exchange, model, body)))
        ask = msgspec.structs.replace(ask, messages=begun(job.model, ask.messages))
        with naming("messages"):
            prepared = await prepare(runtime, job, ask)
        await exchange.answer_json(RenderedPrompt(prompt=shown(prepared.segments)[0]))


def segments_of(content: Mixed, n_vocab: int, *, field: str, trusted: bool = True) -> tuple[Segment, ...]:
    """A text, or texts with token ids between them. Raises BadRequest for an id outside the vocabulary."""
    if isinstance(content, str):
        return (Segment(content, trusted),)
    segments: list[Segment] = []
    ids: list[int] = []
    for item in content:
        if isinstance(item, int):
            ids.append(item)
            continue
        if ids:
            segments.append(_of_ids(ids, n_vocab, field))
            ids = []
        segments.append(Segment(item, trusted))
    return (*segments, _of_ids(ids, n_vocab, field)) if ids else tuple(segments)


async def text_of(job: Job, tokens: list[int], *, field: str) -> str:
    """The text that tokens stand for, control tokens by their names. Raises BadRequest, and what `tokenize` raises."""
    if not tokens:
        return ""
    counted = await job.tokenize([_of_ids(tokens, job.n_vocab, field)], is_prompt=False, wants_pieces=True)
    return b"".join(counted.pieces).decode("utf-8", errors="replace")


def _of_ids(tokens: list[int], n_vocab: int, field: str) -> Segment:
    if max(tokens) >= n_vocab:
        raise BadRequest(f"{field}: {max(tokens)} is not a token of this model, which has {n_vocab}", field=field)
    return Segment("", tokens=tuple(tokens))


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
