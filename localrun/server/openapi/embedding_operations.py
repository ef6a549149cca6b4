"""The routes of embeddings and reranking for the document.

Pure data. Does not: serve them.
"""

from __future__ import annotations

from localrun.server.embedding.bodies import EmbedBody, EmbeddingsBody, LegacyEmbeddingsBody, RerankBody
from localrun.server.openapi import other_answers as answers
from localrun.server.openapi.operation import Family, Operation

_FAMILY = Family.EMBEDDING
_RANK = {"model": "a-reranker", "query": "What do foxes eat?", "documents": ["Foxes eat mice.", "It rains."]}

OPERATIONS = (
    Operation(
        family=_FAMILY, method="POST", path="/v1/embeddings", summary="Vectors of texts, as OpenAI has it",
        body=EmbeddingsBody, answer=answers.Embeddings, serves=True,
        example={"model": "tiny", "input": ["A fox.", "A hare."]},
    ),
    Operation(
        family=_FAMILY, method="POST", path="/api/embed", summary="Vectors of texts, as Ollama has it", body=EmbedBody,
        answer=answers.OllamaEmbeddings, serves=True, description="Without input the model is loaded.",
        example={"model": "tiny", "input": ["A fox.", "A hare."]},
    ),
    Operation(
        family=_FAMILY, method="POST", path="/api/embeddings", summary="The vector of one text, Ollama's older form",
        body=LegacyEmbeddingsBody, answer=answers.LegacyEmbedding, serves=True,
        example={"model": "tiny", "prompt": "A fox."},
    ),
    *(
        Operation(
            family=_FAMILY, method="POST", path=path, summary="Which documents answer a query best", body=RerankBody,
            answer=answers.Ranking, serves=True, example=_RANK,
        )
        for path in ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking", "/v2/rerank")
    ),
)  # fmt: skip
