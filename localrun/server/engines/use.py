"""What a model is loaded for, and whether it can do that.

An engine either generates or computes vectors; a model that is asked for both has two engines, of which the second one
shares the weights' pages with the first. Any model that generates can be asked for embeddings, as with Ollama: they are
the last token's hidden state, which is what such models offer and no match for a model trained for it.

Pure. Does not: load anything (supervisor.py).
"""

from __future__ import annotations

from enum import StrEnum

from localrun.errors import BadRequest
from localrun.models import pooling
from localrun.models.store import Model
from localrun.wire import Pooling


class Use(StrEnum):
    TEXT = "text"
    EMBED = "embed"
    RERANK = "rerank"


def pooling_for(model: Model, use: Use) -> Pooling | None:
    """How an engine for this use pools; None for one that generates.

    Raises BadRequest for a model of another kind, naming what it is for.
    """
    header = model.header
    name = f'"{model.name}"'
    is_reranker = pooling.is_reranker(header)
    if use is Use.RERANK:
        if not is_reranker:
            raise BadRequest(
                f"{name} does not support reranking; choose a model whose file has a ranking head (its pooling type "
                f"is rank), such as bge-reranker or Qwen3-Reranker",
                field="model",
            )
        return Pooling.RANK
    if is_reranker:
        what = "embeddings" if use is Use.EMBED else "chat or generate"
        raise BadRequest(f"{name} does not support {what}; it ranks documents: use /v1/rerank", field="model")
    if use is Use.EMBED:
        return Pooling(pooling.pooling(header))
    if not pooling.generates(header):
        raise BadRequest(
            f"{name} does not support chat or generate; it is an embedding model: use /api/embed or /v1/embeddings",
            field="model",
        )
    return None
