"""Embeddings and reranking, of all API families. What becomes of inputs that are too long, and what vectors and scores
mean, is in the server's README.md.

One request may hold `MAX_INPUTS` inputs, OpenAI's own limit; how long all of them may be is the limit of a body
(`max_body_bytes`). Unknown fields are ignored: clients send `user`, `input_type`, `task` and others that change nothing
here. What only the model can tell (is this token id in its vocabulary) the engine says.

An input of /v1/embeddings and /api/embed may be an object with pictures or sound, which go the way of those in chats
(`media/`); on the former `messages` may be the one input, which the model's template makes a text of, as with vLLM.
Such inputs are never cut.

The engine computes in batches with whatever else is there; here the results are put back into order. A list of a
thousand vectors of a thousand numbers is 20 MB of text and takes half a second to write, so it is written in parts, and
other requests have their turn in between.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest, Cancelled
from localrun.server import streaming
from localrun.server.engines.resident import Use
from localrun.server.http import fields
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.jobs.job import Job
from localrun.server.openai.answer import headers_of
from localrun.server.openai.bodies import ChatMessage, for_template, part_text
from localrun.server.prompting.ask import Attached, Attachments, ChatRequest
from localrun.server.prompting.prepare import prepare
from localrun.server.prompting.segments import is_one, placed, segments_of
from localrun.server.routing import RoutingInput
from localrun.server.runtime import Runtime
from localrun.wire import Finish, Media, Mixed, Segment, Vector

MAX_INPUTS = 2048

# Where a file belongs in the text of an input, as llama-server has it.
MEDIA_PLACE = "<__media__>"


class MediaInput(msgspec.Struct, frozen=True, kw_only=True):
    """An input with pictures or sound, in llama-server's two forms: a `prompt_string` with `<__media__>` where each of
    `multimodal_data` belongs; or `content`, which is parts as in chats."""

    prompt_string: str | None = None
    multimodal_data: list[str] | None = None
    content: list[dict[str, Any]] | None = None

    def text(self, where: str, media: Attachments) -> str:
        """With markers in the place of what is added to `media`. Raises BadRequest."""
        if self.content is not None and self.prompt_string is None and self.multimodal_data is None:
            return "".join(part_text(part, f"{where}.content[{at}]", media) for at, part in enumerate(self.content))
        if self.prompt_string is None or self.content is not None:
            raise BadRequest.of(
                where,
                f"an object needs prompt_string, with {MEDIA_PLACE} for each of its multimodal_data, or content alone",
            )
        if self.multimodal_data is None:
            return self.prompt_string
        text, *others = self.prompt_string.split(MEDIA_PLACE)
        if len(others) != len(self.multimodal_data):
            raise BadRequest.of(
                f"{where}.prompt_string",
                f"{len(others)} places for pictures or sound ({MEDIA_PLACE}), and "
                f"{len(self.multimodal_data)} of multimodal_data; write one for each",
            )
        for at, (source, other) in enumerate(zip(self.multimodal_data, others, strict=True)):
            text += media.add(source, f"{where}.multimodal_data[{at}]") + other
        return text


_Inputs = Annotated[list[str | MediaInput], Meta(max_length=MAX_INPUTS)]
_Dimensions = Annotated[int, Meta(ge=1, le=fields.MAX_TOKENS)]

# A text, or token ids with or without texts between them.
Input = str | tuple[int | str, ...]
_Input = str | list[str | fields.TokenId | list[str | fields.TokenId] | MediaInput] | MediaInput


class EmbeddingsBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /v1/embeddings and /embedding. `truncate` and `keep_alive` are not OpenAI's; `content` is llama-server's
    name of `input`; `messages` are vLLM's, and with them the two fields after."""

    model: fields.ModelName = ""
    input: _Input | None = None
    content: _Input | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    encoding_format: str | None = None
    dimensions: _Dimensions | None = None
    truncate: bool | None = None

    @property
    def asked(self) -> _Input | None:
        """The inputs, by either name."""
        return self.content if self.input is None else self.input

    @property
    def is_base64(self) -> bool:
        """Whether vectors are wanted in base64, or as lists. Raises BadRequest for anything else."""
        asked = (self.encoding_format or "float").lower()
        if asked not in ("float", "base64"):
            raise BadRequest.of("encoding_format", f"{asked[:40]!r} is not known; use float or base64")
        return asked == "base64"

    def chat(self, media: Attachments) -> ChatRequest | None:
        """The one input that `messages` are by the model's template, if there are any. Raises BadRequest."""
        if self.messages is None:
            return None
        if self.asked is not None:
            raise BadRequest.of("messages", "not together with input; send one of them")
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise BadRequest.of("add_generation_prompt", "not together with continue_final_message, which adds none")
        made = for_template(self.messages, media)
        adds_prompt = continues or bool(self.add_generation_prompt)
        return ChatRequest(messages=made, continue_last=continues, adds_prompt=adds_prompt, media=media.all())

    def inputs(self, media: Attachments) -> list[Input]:
        """Each as text or as token ids; what their objects show goes into `media`. Raises BadRequest for none, ids
        beside other inputs, an empty one, and too many."""
        asked = self.asked or []
        if isinstance(asked, str | MediaInput):
            inputs: list[Input] = [_text(asked, "input", media)]
        elif is_one(asked):
            inputs = [tuple(item for item in asked if isinstance(item, int | str))]
        else:
            inputs = [
                tuple(item) if isinstance(item, list) else _text(item, f"input[{at}]", media)
                for at, item in enumerate(asked)
                if not isinstance(item, int) and not (isinstance(item, list) and item and not is_one(item))
            ]
            if not inputs or len(inputs) != len(asked):
                raise BadRequest.of(
                    "input",
                    "must be a text, a list of token ids with or without texts between them, or a list of "
                    "these, not empty; an object with pictures or sound counts as an input of its own",
                )
        if len(inputs) > MAX_INPUTS:
            raise BadRequest.of(
                "input", f"{len(inputs)} inputs are more than {MAX_INPUTS} in one request; send several"
            )
        empty = next((index for index, item in enumerate(inputs) if not item), None)
        if empty is not None:
            where = f"input[{empty}]" if len(inputs) > 1 else "input"
            raise BadRequest.of(where, "must not be empty; leave it out")
        return inputs


def _text(item: str | MediaInput, where: str, media: Attachments) -> str:
    return item if isinstance(item, str) else item.text(where, media)


class EmbedBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /api/embed. Of `options` none is about embeddings: they decide how a model is loaded, or sample."""

    model: str
    input: str | _Inputs | MediaInput | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0, le=fields.MAX_TOKENS)] | None = None
    options: dict[str, Any] | None = None

    def inputs(self, media: Attachments) -> list[Input]:
        """None at all means to load the model. What objects show goes into `media`. Raises BadRequest."""
        if isinstance(self.input, str | MediaInput):
            return [_text(self.input, "input", media)] if self.input else []
        return [_text(item, f"input[{at}]", media) for at, item in enumerate(self.input or ())]


class LegacyEmbeddingsBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /api/embeddings."""

    model: str
    prompt: str = ""
    options: dict[str, Any] | None = None


class DocumentObject(msgspec.Struct, frozen=True):
    """A document as Jina and Cohere write it when it is not a bare text."""

    text: str


class RerankBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /v1/rerank, and the other paths of it. `truncate` and `keep_alive` are localrun's own; `texts` and
    `return_text` are of TEI, whose form the answer has then. `top_n` 0 means all, as vLLM has it."""

    model: fields.ModelName = ""
    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | DocumentObject], Meta(min_length=1, max_length=MAX_INPUTS)] | None = None
    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)] | None = None
    return_text: bool | None = None
    top_n: Annotated[int, Meta(ge=0, le=fields.MAX_TOKENS)] | None = None
    return_documents: bool | None = None
    truncate: bool | None = None

    def each(self) -> list[str]:
        """The documents, in either form. Raises BadRequest for none."""
        if self.documents is not None:
            return [one if isinstance(one, str) else one.text for one in self.documents]
        if self.texts is None:
            raise BadRequest("documents is required", field="documents")
        return self.texts


# --- answers ---

# About a millisecond of work.
_NUMBERS_PER_TURN = 16_384
_BYTES_PER_NUMBER = 4

_encoder = msgspec.json.Encoder()


def _vector_values(vector: Vector) -> list[float]:
    numbers = array("f", vector.values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


async def _lists_json(vectors: Sequence[Vector]) -> list[bytes]:
    lists, n_since = [], 0
    for vector in vectors:
        lists.append(_encoder.encode(_vector_values(vector)))
        n_since += len(vector.values) // _BYTES_PER_NUMBER
        if n_since >= _NUMBERS_PER_TURN:
            n_since = 0
            await asyncio.sleep(0)
    return lists


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is wanted. With `query`, the inputs are documents to be scored. Markers in the inputs stand for `media`. A
    `chat` is the only input. `needs_name` is of APIs that have no requests without a model's name."""

    inputs: Sequence[Input] = ()
    media: Sequence[Attached] = ()
    chat: ChatRequest | None = None
    query: str | None = None
    truncate: bool = False
    dimensions: int = 0
    body: fields.ServiceFields
    needs_name: bool = False


class Results(NamedTuple):
    """One vector for each input, in order."""

    vectors: list[Vector]

    @property
    def n_tokens(self) -> int:
        return sum(vector.n_tokens for vector in self.vectors)

    @property
    def n_cut(self) -> int:
        """Tokens that were left out of inputs that were too long."""
        return sum(vector.n_cut for vector in self.vectors)


@asynccontextmanager
async def _done(runtime: Runtime, exchange: Exchange, work: Work) -> AsyncIterator[tuple[Job, Results]]:
    """The job and its results, while the model is held and the client is there.

    Raises BadRequest for a model of another kind, for `dimensions` that it does not have and for media that it does not
    take, ContextExceeded for an input that is too long, and what loading and the engine raise.
    """
    use = Use.EMBED if work.query is None else Use.RERANK
    question = RoutingInput(ask=ChatRequest(messages=(), media=tuple(work.media)))
    entered = streaming.entered(runtime, exchange, work.body, question, use=use, needs_name=work.needs_name)
    async with entered as (_, _, [job]):
        if work.dimensions > job.ready.n_embd:
            raise BadRequest.of(
                "dimensions",
                f"the vectors of this model have {job.ready.n_embd} numbers, {work.dimensions} is more; ask for "
                f"fewer or leave it out",
            )
        vectors: list[Vector] = []
        if inputs := await _inputs(runtime, job, work):
            await job.embed(inputs, query=work.query, truncate=work.truncate, dimensions=work.dimensions)
            async for delta in job:
                vectors += delta.vectors or ()
                if delta.finish is Finish.CANCELLED:
                    raise Cancelled("the request was cancelled")
        vectors.sort(key=lambda vector: vector.index)
        yield job, Results(vectors)


async def _inputs(runtime: Runtime, job: Job, work: Work) -> Sequence[str | tuple[int, ...] | Mixed]:
    """As the engine takes them: a conversation by the model's template, and media in the places of their markers."""
    if work.chat is not None:
        return [Mixed((await prepare(runtime, job, work.chat)).segments)]
    decoded = await runtime.media.attach(job, work.media) if work.media else {}
    return [_in_segments(one, work.media, decoded, job.ready.n_vocab) for one in work.inputs]


def _in_segments(
    one: Input, media: Sequence[Attached], decoded: Mapping[str, Media], n_vocab: int
) -> str | tuple[int, ...] | Mixed:
    """An input of more than one kind in segments, others as they are."""
    if isinstance(one, tuple):
        ids = tuple(item for item in one if isinstance(item, int))
        return ids if len(ids) == len(one) else Mixed(segments_of(one, n_vocab, field="input"))
    own = [attached for attached in media if attached.marker in one]
    return Mixed(placed([Segment(one)], own, decoded, ())) if own else one


def _headers(job: Job, results: Results) -> Headers:
    """The request's id, and how many tokens were cut, if any."""
    found = headers_of([job])
    if results.n_cut:
        found.append((b"x-localrun-truncated", str(results.n_cut).encode("ascii")))
    return found


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the inputs."""

    prompt_tokens: int
    total_tokens: int


class LegacyEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt's vector; empty without a prompt."""

    embedding: list[float]


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document's text, with `return_documents`."""

    text: str


class RankedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A document by its place in the request, and how well it answers the query."""

    index: int
    relevance_score: float
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET


class ScoredText(msgspec.Struct, frozen=True, kw_only=True):
    """One of `texts`, as TEI tells of it; the text itself with `return_text`."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET


class VectorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One input's vectors, of which there is one."""

    index: int
    embedding: list[list[float]]


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """The documents, best first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RankedRow]
    usage: EmbeddingUsage
    meta: dict[str, Any]


async def embeddings(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(EmbeddingsBody)
    is_base64 = body.is_base64
    async with _done(runtime, exchange, _work(body)) as (job, results):
        if is_base64:
            # As OpenAI has it: the little-endian float32 bytes, in quotes.
            written = [b'"' + base64.b64encode(vector.values) + b'"' for vector in results.vectors]
        else:
            written = await _lists_json(results.vectors)
        rows = [b'{"object":"embedding","index":%d,"embedding":%b}' % (index, one) for index, one in enumerate(written)]
        usage = EmbeddingUsage(prompt_tokens=results.n_tokens, total_tokens=results.n_tokens)
        answer = b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (
            b",".join(rows), msgspec.json.encode(job.ask.model), msgspec.json.encode(usage),
        )  # fmt: skip
        await exchange.answer(answer, headers=_headers(job, results))


async def embedding(runtime: Runtime, exchange: Exchange) -> None:
    """POST /embedding, in llama-server's form: a list of rows, each of which has a list of vectors."""
    body = await exchange.read_json(EmbeddingsBody)
    async with _done(runtime, exchange, _work(body)) as (job, results):
        lists = await _lists_json(results.vectors)
        rows = [b'{"index":%d,"embedding":[%b]}' % row for row in enumerate(lists)]
        await exchange.answer(b"[%b]" % b",".join(rows), headers=_headers(job, results))


def _work(body: EmbeddingsBody) -> Work:
    media = Attachments()
    chat = body.chat(media)
    return Work(
        inputs=body.inputs(media) if chat is None else (),
        media=media.all(),
        chat=chat,
        truncate=bool(body.truncate),
        dimensions=body.dimensions or 0,
        body=body,
    )


async def embed(runtime: Runtime, exchange: Exchange) -> None:
    began_s = time.monotonic()
    body = await exchange.read_json(EmbedBody)
    media = Attachments()
    inputs = body.inputs(media)
    wanted = Work(
        inputs=inputs,
        media=media.all(),
        truncate=body.truncate is not False,
        dimensions=body.dimensions or 0,
        body=body,
        needs_name=True,
    )
    async with _done(runtime, exchange, wanted) as (job, results):
        lists = await _lists_json(results.vectors)
        rest = {
            "total_duration": round((time.monotonic() - began_s) * 1e9),
            "load_duration": round(job.load_s * 1e9),
            "prompt_eval_count": results.n_tokens,
        }
        answer = b'{"model":%b,"embeddings":[%b],%b' % (
            msgspec.json.encode(body.model), b",".join(lists), msgspec.json.encode(rest)[1:],
        )  # fmt: skip
        await exchange.answer(answer, headers=_headers(job, results))


async def legacy_embeddings(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(LegacyEmbeddingsBody)
    wanted = Work(inputs=[body.prompt] if body.prompt else [], truncate=True, body=body, needs_name=True)
    async with _done(runtime, exchange, wanted) as (job, results):
        found = _vector_values(results.vectors[0]) if results.vectors else []
        await exchange.answer_json(LegacyEmbedding(embedding=found), headers=_headers(job, results))


async def rerank(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(RerankBody)
    texts = body.each()
    wanted = Work(inputs=texts, query=body.query, truncate=body.truncate is not False, body=body)
    async with _done(runtime, exchange, wanted) as (job, results):
        scores = [_vector_values(vector)[0] for vector in results.vectors]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        if body.documents is None:
            scored = [
                ScoredText(index=index, score=scores[index], text=texts[index] if body.return_text else msgspec.UNSET)
                for index in best
            ]
            await exchange.answer_json(scored, headers=_headers(job, results))
            return
        rows = [
            RankedRow(
                index=index,
                relevance_score=scores[index],
                document=RankedDocument(text=texts[index]) if body.return_documents else msgspec.UNSET,
            )
            for index in best
        ]
        answer = Ranking(
            id=job.id,
            object="list",
            model=job.ask.model,
            results=rows,
            usage=EmbeddingUsage(prompt_tokens=results.n_tokens, total_tokens=results.n_tokens),
            meta={"tokens": {"input_tokens": results.n_tokens}},
        )
        await exchange.answer_json(answer, headers=_headers(job, results))
