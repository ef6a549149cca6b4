"""POST /api/embed and /api/embeddings, Ollama's two ways to ask.

Inputs that are too long lose their end, unless `truncate` is false; the header `X-Localrun-Truncated` counts the tokens
that were left out. No input at all loads the model. Vectors have length 1 on both routes.
"""

from __future__ import annotations

import time

import msgspec

from localrun.server.embedding import numbers, work
from localrun.server.embedding.bodies import EmbedBody, LegacyEmbeddingsBody
from localrun.server.embedding.work import Work
from localrun.server.http import bodies
from localrun.server.http.exchange import Exchange
from localrun.server.runtime import Runtime


async def embed(runtime: Runtime, exchange: Exchange) -> None:
    """POST /api/embed."""
    began_s = time.monotonic()
    body = await bodies.read(exchange, EmbedBody)
    wanted = Work(
        model=body.model,
        inputs=body.inputs(),
        truncate=body.truncate is not False,
        dimensions=body.dimensions or 0,
        fields=body,
    )
    async with work.done(runtime, exchange, wanted) as (job, results):
        lists = await numbers.lists_json(results.vectors)
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
    body = await bodies.read(exchange, LegacyEmbeddingsBody)
    wanted = Work(
        model=body.model,
        inputs=[body.prompt] if body.prompt else [],
        truncate=True,
        fields=body,
    )
    async with work.done(runtime, exchange, wanted) as (job, results):
        found = numbers.values(results.vectors[0]) if results.vectors else []
        await exchange.answer_json({"embedding": found}, headers=work.headers(job, results))
