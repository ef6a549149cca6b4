"""OpenAI's views on models: `/v1/models` and `/v1/models/{id}`. Answered from file headers, nothing is loaded."""

from __future__ import annotations

import asyncio
from typing import Any

from localrun.models.store import Model
from localrun.server.http.exchange import Exchange
from localrun.server.runtime import Runtime


async def list_(runtime: Runtime, exchange: Exchange) -> None:
    """GET /v1/models."""
    models = await asyncio.to_thread(runtime.store.list)
    rows = [_row(model, model.name) for model in models]
    await exchange.answer_json({"object": "list", "data": rows})


async def one(runtime: Runtime, exchange: Exchange) -> None:
    """GET /v1/models/{id}."""
    name: str = exchange.scope["path_params"]["id"]
    model = await asyncio.to_thread(runtime.store.resolve, name)
    await exchange.answer_json(_row(model, name))


def _row(model: Model, name: str) -> dict[str, Any]:
    header = model.header
    return {
        "id": name,
        "object": "model",
        "created": int(model.modified_at.timestamp()),
        "owned_by": "localrun",
        # Beside OpenAI's fields, as llama-server has it.
        "meta": {
            "n_ctx_train": header.n_ctx_train,
            "n_params": header.n_params,
            "n_vocab": header.n_vocab,
            "size": model.size_bytes,
        },
    }
