"""Embeddings and reranking, of all API families. What becomes of inputs that are too long, and what vectors and scores
mean, is in the server's README.md.

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
from typing import Any, Literal, NamedTuple

import msgspec

from localrun.errors import BadRequest, Cancelled
from localrun.server import streaming
from localrun.server.embedding.bodies import EmbedBody, EmbeddingsBody, Input, LegacyEmbeddingsBody, RerankBody
from localrun.server.engines.resident import Use
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.http.fields import ServiceFields
from localrun.server.jobs.job import Job
from localrun.server.openai.answer import headers_of
from localrun.server.prompting.ask import Attached, Attachments, ChatRequest
from localrun.server.prompting.prepare import prepare
from localrun.server.prompting.segments import placed, segments_of
from localrun.server.routing import RoutingInput
from localrun.server.runtime import Runtime
from localrun.wire import Finish, Media, Mixed, Segment, Vector

# About a millisecond of work.
_NUMBERS_PER_TURN = 16_384
_BYTES_PER_NUMBER = 4

_encoder = msgspec.json.Encoder()


def vector_values(vector: Vector) -> list[float]:
    numbers = array("f", vector.values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def base64_json(vector: Vector) -> bytes:
    """As OpenAI's `encoding_format` base64: the little-endian float32 bytes, in quotes."""
    return b'"' + base64.b64encode(vector.values) + b'"'


async def lists_json(vectors: Sequence[Vector]) -> list[bytes]:
    lists, n_since = [], 0
    for vector in vectors:
        lists.append(_encoder.encode(vector_values(vector)))
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
    fields: ServiceFields
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
    entered = streaming.entered(runtime, exchange, work.fields, question, use=use, needs_name=work.needs_name)
    async with entered as (_, _, [job]):
        if work.dimensions > job.n_embd:
            raise BadRequest.of(
                "dimensions",
                f"the vectors of this model have {job.n_embd} numbers, {work.dimensions} is more; ask for "
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
    return [_in_segments(one, work.media, decoded, job.n_vocab) for one in work.inputs]


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
            written = [base64_json(vector) for vector in results.vectors]
        else:
            written = await lists_json(results.vectors)
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
        lists = await lists_json(results.vectors)
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
        fields=body,
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
        fields=body,
        needs_name=True,
    )
    async with _done(runtime, exchange, wanted) as (job, results):
        lists = await lists_json(results.vectors)
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
    wanted = Work(inputs=[body.prompt] if body.prompt else [], truncate=True, fields=body, needs_name=True)
    async with _done(runtime, exchange, wanted) as (job, results):
        found = vector_values(results.vectors[0]) if results.vectors else []
        await exchange.answer_json(LegacyEmbedding(embedding=found), headers=_headers(job, results))


async def rerank(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(RerankBody)
    texts = body.each()
    wanted = Work(inputs=texts, query=body.query, truncate=body.truncate is not False, fields=body)
    async with _done(runtime, exchange, wanted) as (job, results):
        scores = [vector_values(vector)[0] for vector in results.vectors]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
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
