"""The routes of embeddings and reranking, of all API families.

Does not: hold any logic; each route's module does.
"""

from __future__ import annotations

from starlette.routing import Route

from localrun.server.embedding.ollama import embed, legacy_embeddings
from localrun.server.embedding.openai import embeddings
from localrun.server.embedding.rerank import rerank
from localrun.server.http.exchange import route
from localrun.server.runtime import Runtime

# llama.cpp's server answers on the first four, Cohere's clients ask the last.
_RERANK_PATHS = ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking", "/v2/rerank")


def routes(runtime: Runtime) -> list[Route]:
    return [
        route("/v1/embeddings", runtime, embeddings, methods=["POST"]),
        route("/api/embed", runtime, embed, methods=["POST"]),
        route("/api/embeddings", runtime, legacy_embeddings, methods=["POST"]),
        *(route(path, runtime, rerank, methods=["POST"]) for path in _RERANK_PATHS),
    ]
