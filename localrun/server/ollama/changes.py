"""Ollama's small changes to the store: `/api/copy`, `/api/delete`, `/api/push`.

A model that is removed is unloaded first; requests that run on it end in peace. What a removal freed and kept is in the
answer to DELETE, where Ollama has nothing.

Does not: decide what may be removed (models/naming.py).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from localrun.errors import BadModelFile, BadRequest, ModelNotFound, NotSupported
from localrun.models import naming
from localrun.models.naming import Removed
from localrun.server.http import bodies
from localrun.server.http.exchange import Exchange
from localrun.server.ollama.bodies import ModelBody
from localrun.server.runtime import Runtime


class CopyBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/copy."""

    source: str
    destination: str


async def copy(runtime: Runtime, exchange: Exchange) -> None:
    """POST /api/copy: a second name for a model."""
    body = await bodies.read(exchange, CopyBody)
    await asyncio.to_thread(naming.copy, runtime.store, body.source, body.destination)
    await exchange.answer(b"")


async def delete(runtime: Runtime, exchange: Exchange) -> None:
    """DELETE /api/delete."""
    body = await bodies.read(exchange, ModelBody)
    name = body.model_name
    await asyncio.to_thread(naming.check_removable, runtime.store, name)
    # A model whose file is damaged or gone is not loaded under this name, and may be removed all the same.
    with suppress(ModelNotFound, BadModelFile, BadRequest):
        await runtime.supervisor.unload(name)
    removed = await asyncio.to_thread(naming.remove, runtime.store, name)
    await exchange.answer_json(_shown(removed))


async def push(_: Runtime, exchange: Exchange) -> None:
    """POST /api/push."""
    await exchange.read_body()
    raise NotSupported(
        "push: uploading models is not supported; share the GGUF file itself (localrun show MODEL names it), for "
        "example with `hf upload` to a repository of your own on the Hugging Face hub"
    )


def _shown(removed: Removed) -> dict[str, object]:
    return {
        "freed_bytes": removed.freed_bytes,
        "deleted": [str(path) for path in removed.files],
        "kept": [{"path": str(kept.path), "reason": kept.reason} for kept in removed.kept],
    }
