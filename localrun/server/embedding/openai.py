"""POST /v1/embeddings. An input that is too long is an error, unless the body says `"truncate": true`."""

from __future__ import annotations

import msgspec

from localrun.server.embedding import numbers, work
from localrun.server.embedding.bodies import EmbeddingsBody
from localrun.server.embedding.work import Work
from localrun.server.http import bodies
from localrun.server.http.exchange import Exchange
from localrun.server.runtime import Runtime


async def embeddings(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await bodies.read(exchange, EmbeddingsBody)
    wanted = Work(
        model=body.model,
        inputs=body.inputs(),
        truncate=bool(body.truncate),
        dimensions=body.dimensions or 0,
        fields=body,
    )
    async with work.done(runtime, exchange, wanted) as (job, results):
        if body.encoding_format == "base64":
            written = [numbers.base64_json(vector) for vector in results.vectors]
        else:
            written = await numbers.lists_json(results.vectors)
        rows = [b'{"object":"embedding","index":%d,"embedding":%b}' % (index, one) for index, one in enumerate(written)]
        usage = {"prompt_tokens": results.n_tokens, "total_tokens": results.n_tokens}
        answer = b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (
            b",".join(rows), msgspec.json.encode(body.model), msgspec.json.encode(usage),
        )  # fmt: skip
        await exchange.answer(answer, headers=work.headers(job, results))
