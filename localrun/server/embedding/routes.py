"""Embeddings and reranking, of all API families.

- POST /v1/embeddings: an input that is too long is an error, unless the body says `"truncate": true`
- POST /api/embed and /api/embeddings: inputs that are too long lose their end, unless `truncate` is false; the header
  `X-Localrun-Truncated` counts the tokens that were left out. No input at all loads the model. Vectors have length 1 on
  both routes
- On both, an input may be an object with pictures or sound, and on the former `messages` may be the one input, which
  the model's template makes a text of, as with vLLM. Such inputs are never cut
- POST /v1/rerank and its other paths: how well documents answer a query, best first, with the fields that Jina's
  clients and Cohere's look for. Scores are those of the model's own head, as llama.cpp's server gives them: only their
  order and their differences mean something across models. A document that is too long loses its end, unless the body
  says `"truncate": false`; a query that is too long is an error
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from localrun.server.embedding import work
from localrun.server.embedding.bodies import EmbedBody, EmbeddingsBody, LegacyEmbeddingsBody, RerankBody
from localrun.server.embedding.work import Work, base64_json, lists_json, vector_values
from localrun.server.http.exchange import Exchange
from localrun.server.prompting.ask import Attachments
from localrun.server.runtime import Runtime


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
    async with work.done(runtime, exchange, _work(body)) as (job, results):
        if is_base64:
            written = [base64_json(vector) for vector in results.vectors]
        else:
            written = await lists_json(results.vectors)
        rows = [b'{"object":"embedding","index":%d,"embedding":%b}' % (index, one) for index, one in enumerate(written)]
        usage = EmbeddingUsage(prompt_tokens=results.n_tokens, total_tokens=results.n_tokens)
        answer = b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (
            b",".join(rows), msgspec.json.encode(job.ask.model), msgspec.json.encode(usage),
        )  # fmt: skip
        await exchange.answer(answer, headers=work.headers(job, results))


async def embedding(runtime: Runtime, exchange: Exchange) -> None:
    """POST /embedding, in llama-server's form: a list of rows, each of which has a list of vectors."""
    body = await exchange.read_json(EmbeddingsBody)
    async with work.done(runtime, exchange, _work(body)) as (job, results):
        lists = await lists_json(results.vectors)
        rows = [b'{"index":%d,"embedding":[%b]}' % row for row in enumerate(lists)]
        await exchange.answer(b"[%b]" % b",".join(rows), headers=work.headers(job, results))


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
    """POST /api/embed."""
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
    async with work.done(runtime, exchange, wanted) as (job, results):
        lists = await lists_json(results.vectors)
        rest = {
            "total_duration": round((time.monotonic() - began_s) * 1e9),
            "load_duration": round(job.load_s * 1e9),
            "prompt_eval_count": results.n_tokens,
        }
        answer = b'{"model":%b,"embeddings":[%b],%b' % (
            msgspec.json.encode(body.model), b",".join(lists), msgspec.json.encode(rest)[1:],
        )  # fmt: skip
        await exchange.answer(answer, headers=work.headers(job, results))


async def legacy_embeddings(runtime: Runtime, exchange: Exchange) -> None:
    """POST /api/embeddings."""
    body = await exchange.read_json(LegacyEmbeddingsBody)
    wanted = Work(inputs=[body.prompt] if body.prompt else [], truncate=True, fields=body, needs_name=True)
    async with work.done(runtime, exchange, wanted) as (job, results):
        found = vector_values(results.vectors[0]) if results.vectors else []
        await exchange.answer_json(LegacyEmbedding(embedding=found), headers=work.headers(job, results))


async def rerank(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(RerankBody)
    texts = body.each()
    wanted = Work(inputs=texts, query=body.query, truncate=body.truncate is not False, fields=body)
    async with work.done(runtime, exchange, wanted) as (job, results):
        scores = [vector_values(vector)[0] for vector in results.vectors]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        if body.documents is None:
            scored = [
                ScoredText(index=index, score=scores[index], text=texts[index] if body.return_text else msgspec.UNSET)
                for index in best
            ]
            await exchange.answer_json(scored, headers=work.headers(job, results))
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
        await exchange.answer_json(answer, headers=work.headers(job, results))
