"""POST /tokenize, /detokenize and /apply-template: what a text is to the model, and the reverse. Nothing is generated;
the model is loaded for its vocabulary.

The first two also take what vLLM's routes of these names take and answer, and GET /tokenizer_info is vLLM's: by these
three lm-eval needs no tokenizer of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from localrun.errors import BadRequest
from localrun.models.gguf.header import special_token_text
from localrun.server import streaming
from localrun.server.http import fields
from localrun.server.http.exchange import Exchange, apart, parameter
from localrun.server.http.fields import ServiceFields
from localrun.server.openai.answer import piece_text
from localrun.server.openai.chat import ChatBody, prepared_of
from localrun.server.prompting.ask import ChatRequest
from localrun.server.prompting.segments import check_ids, segments_of, shown
from localrun.server.routing import NO_QUESTION, RoutingInput
from localrun.server.runtime import Runtime
from localrun.wire import MAX_COUNTED_TOKENS, Counted

# A text, or texts and token ids one after the other.
Mixed = str | list[str | fields.TokenId]


class TokenizeBody(ServiceFields, frozen=True, kw_only=True):
    """POST /tokenize. `prompt`, `add_special_tokens` and `return_token_strs` are vLLM's."""

    content: Mixed = ""
    model: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    @property
    def is_vllms(self) -> bool:
        return self.prompt is not None

    def check_supported(self) -> None:
        """Raises BadRequest for fields that contradict each other."""
        if self.is_vllms and self.content:
            raise BadRequest.of("prompt", "not together with content; send one of them")


class DetokenizeBody(ServiceFields, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: Annotated[list[fields.TokenId], Meta(min_length=0)] | None = None
    model: str | None = None


class TemplateBody(ChatBody, frozen=True, kw_only=True):
    """POST /apply-template. As llama-server, it goes on with a last message of the assistant's."""

    model: Annotated[str, Meta(description="")] | None = None  # type: ignore[assignment]

    def ask(self) -> ChatRequest:
        """The conversation, and whether the opening of an answer follows it. Raises BadRequest."""
        return msgspec.structs.replace(super().ask(), adds_prompt=self.add_generation_prompt is not False)

    def continues(self) -> bool:
        """Whether the prompt ends where the last message does. Raises BadRequest."""
        if self.continue_final_message or self.messages[-1].prefix:
            return super().continues()
        return self.messages[-1].role == "assistant" and self.add_generation_prompt is None


class TokenPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A token and what it stands for: text, or bytes where these are a part of a character."""

    id: int
    piece: str | list[int]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a text; with `with_pieces` objects instead of numbers. The others are vLLM's, for a `prompt`."""

    tokens: list[int | TokenPiece]
    count: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The text of tokens, by llama-server's name and by vLLM's. Bytes that are no whole character are U+FFFD."""

    content: str
    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's file says of its tokenizer."""

    bos_token: str
    eos_token: str
    chat_template: str
    vocab_size: int
    model_max_length: int


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's chat template makes of a conversation."""

    prompt: str


async def tokenize(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(TokenizeBody)
    body.check_supported()
    async with streaming.entered(runtime, exchange, body, NO_QUESTION, use=None, is_for_one=True) as (_, _, [job]):
        field, text = ("prompt", body.prompt or "") if body.is_vllms else ("content", body.content)
        segments = segments_of(text, job.ready.n_vocab, field=field, trusted=body.parse_special)
        with _naming(field):
            counted = await job.tokenize(
                segments,
                is_prompt=body.add_special_tokens if body.is_vllms else body.add_special,
                wants_pieces=body.with_pieces or bool(body.return_token_strs),
            )
        if len(counted.tokens) >= MAX_COUNTED_TOKENS:  # of more than that there are only the ends
            raise BadRequest.of(field, f"{MAX_COUNTED_TOKENS} tokens or more; send it in parts")
        await exchange.answer(b"{%b}" % b",".join(await _parts(body, counted, job.ready.n_ctx)))


async def detokenize(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(DetokenizeBody)
    async with streaming.entered(runtime, exchange, body, NO_QUESTION, use=None, is_for_one=True) as (_, _, [job]):
        text = ""
        if body.tokens:
            check_ids(body.tokens, job.ready.n_vocab, "tokens")
            with _naming("tokens"):
                text = await job.text_of(body.tokens)
        await exchange.answer_json(Detokenized(content=text, prompt=text))


async def tokenizer_info(runtime: Runtime, exchange: Exchange) -> None:
    """Nothing is loaded."""
    name = await runtime.targets.named(exchange.caller, parameter(exchange, "model"))
    model = await runtime.targets.one(exchange.caller, name)
    header = model.header
    await exchange.answer_json(
        TokenizerInfo(
            bos_token=special_token_text(header, "tokenizer.ggml.bos_token_id"),
            eos_token=special_token_text(header, "tokenizer.ggml.eos_token_id"),
            chat_template=model.template or model.guessed_template,
            vocab_size=header.n_vocab,
            model_max_length=header.n_ctx_train,
        )
    )


async def apply_template(runtime: Runtime, exchange: Exchange) -> None:
    """Pictures and sound are `[img-0]` and so on in the prompt."""
    body = await exchange.read_json(TemplateBody)
    body.check_supported()
    ask = await apart(body.ask)
    async with streaming.entered(runtime, exchange, body, RoutingInput(ask=ask), is_for_one=True) as (_, _, [job]):
        prepared = await prepared_of(runtime, job, ask)
        await exchange.answer_json(RenderedPrompt(prompt=shown(prepared.segments)[0]))


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """What the engine says of a text is said of this field."""
    try:
        yield
    except BadRequest as error:
        error.field = error.field or field
        raise


# About a millisecond of work.
_TOKENS_PER_TURN = 8192


async def _parts(body: TokenizeBody, counted: Counted, n_ctx: int) -> list[bytes]:
    """The fields of the answer. Written in parts, for there may be millions of tokens."""
    parts = []
    if body.with_pieces:
        pairs = list(zip(counted.tokens, counted.pieces, strict=True))
        parts.append(await _list_of("tokens", pairs, lambda pair: TokenPiece(id=pair[0], piece=_piece(pair[1]))))
    else:
        parts.append(await _list_of("tokens", counted.tokens))
    if body.is_vllms:
        parts.append(b'"count":%d,"max_model_len":%d' % (len(counted.tokens), n_ctx))
    if body.return_token_strs:
        parts.append(await _list_of("token_strs", counted.pieces, piece_text))
    return parts


async def _list_of(name: str, items: Sequence[Any], shown: Callable[[Any], object] | None = None) -> bytes:
    written = []
    for start in range(0, len(items), _TOKENS_PER_TURN):
        part = items[start : start + _TOKENS_PER_TURN]
        written.append(msgspec.json.encode(part if shown is None else [shown(item) for item in part])[1:-1])
        await asyncio.sleep(0)
    return b'"%b":[%b]' % (name.encode("ascii"), b",".join(written))


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
