"""The daemon's own routes about getting models; `/api/pull` itself is Ollama's.

    GET    /localrun/v1/pulls            {"pulls": [PullRow, ...]}: those under way, and the last ones that ended
    DELETE /localrun/v1/pulls?model=M    cancels one, keeping what was transferred: {"model": ..., "cancelled": true}
    GET    /localrun/v1/catalog          {"models": [catalogue entries]}; ?model=M for the one that a name stands for
    GET    /localrun/v1/search?query=Q   {"catalog": [entries], "hub": [repositories], "problem": why there are no
                                         repositories, or null}; &limit=N, 1 to 100

Runs in the daemon's event loop. Does not: rank (the hub does, by downloads).
"""

from __future__ import annotations

from starlette.routing import Route

from localrun.errors import BadRequest, DownloadFailed, Unavailable
from localrun.models import catalog
from localrun.models.name import ModelName
from localrun.models.sources import huggingface
from localrun.models.sources.huggingface import HubHit
from localrun.server.http.endpoint import route
from localrun.server.http.exchange import Exchange
from localrun.server.http.query import parameter
from localrun.server.runtime import Runtime

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
MAX_QUERY_CHARS = 200


def routes(runtime: Runtime) -> list[Route]:
    """The routes, bound to a runtime."""
    return [
        route("/localrun/v1/pulls", runtime, _pulls, methods=["GET"]),
        route("/localrun/v1/pulls", runtime, _cancel, methods=["DELETE"]),
        route("/localrun/v1/catalog", runtime, _catalog, methods=["GET"]),
        route("/localrun/v1/search", runtime, _search, methods=["GET"]),
    ]


async def _pulls(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json({"pulls": runtime.pulls.rows()})


async def _cancel(runtime: Runtime, exchange: Exchange) -> None:
    model = parameter(exchange, "model")
    if not model:
        raise BadRequest("model is required: DELETE /localrun/v1/pulls?model=NAME", field="model")
    await runtime.pulls.cancel(model)
    await exchange.answer_json({"model": model, "cancelled": True})


async def _catalog(_: Runtime, exchange: Exchange) -> None:
    model = parameter(exchange, "model")
    found = catalog.find(ModelName.parse(model)) if model else None
    entries = catalog.entries() if not model else () if found is None else (found.entry,)
    await exchange.answer_json({"models": entries})


async def _search(runtime: Runtime, exchange: Exchange) -> None:
    query = parameter(exchange, "query").strip()
    if len(query) > MAX_QUERY_CHARS:
        raise BadRequest(f"query has {len(query)} characters; the limit is {MAX_QUERY_CHARS}", field="query")
    limit = _limit(exchange)
    hits: list[HubHit] = []
    problem: str | None = None
    await exchange.read_body()
    if query:
        try:
            async with exchange.while_connected():
                hits = await huggingface.search(query, hub=runtime.pulls.hub, limit=limit)
        except (DownloadFailed, Unavailable) as error:
            # The catalogue answers without a network.
            problem = error.message
    await exchange.answer_json({"catalog": catalog.search(query), "hub": hits, "problem": problem})


def _limit(exchange: Exchange) -> int:
    text = parameter(exchange, "limit") or str(DEFAULT_LIMIT)
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise BadRequest(f"limit must be a number from 1 to {MAX_LIMIT}, not {text[:40]!r}", field="limit")
    return limit
