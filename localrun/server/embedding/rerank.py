"""POST /v1/rerank, /v2/rerank and /rerank: how well documents answer a query, best first.

The answer has the fields that Jina's clients and Cohere's look for. Scores are those of the model's own head, as
llama.cpp's server gives them: only their order and their differences mean something across models. A document that is
too long for the model loses its end, unless the body says `"truncate": false`; a query that is too long is an error.
"""

from __future__ import annotations

from typing import Any

from localrun.server.embedding import numbers, work
from localrun.server.embedding.bodies import RerankBody
from localrun.server.embedding.work import Work
from localrun.server.http import bodies
from localrun.server.http.exchange import Exchange
from localrun.server.runtime import Runtime


async def rerank(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await bodies.read(exchange, RerankBody)
    texts = body.texts()
    wanted = Work(
        model=body.model,
        inputs=texts,
        query=body.query,
        truncate=body.truncate is not False,
        fields=body,
    )
    async with work.done(runtime, exchange, wanted) as (job, results):
        scores = [numbers.values(vector)[0] for vector in results.vectors]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        rows: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if body.return_documents:
            for row in rows:
                row["document"] = {"text": texts[row["index"]]}
        answer = {
            "id": job.id,
            "object": "list",
            "model": body.model,
            "results": rows,
            "usage": {"prompt_tokens": results.n_tokens, "total_tokens": results.n_tokens},
            "meta": {"tokens": {"input_tokens": results.n_tokens}},
        }
        await exchange.answer_json(answer, headers=work.headers(job, results))
