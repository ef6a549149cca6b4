"""Ollama's lists of models: `/api/tags`, `/api/ps`.

Answered from file headers that the store keeps in memory; none of them loads a model, and many at once cost little.

Does not: hash weights. `digest` identifies a model's state on this machine (models/model.py), and is no content hash.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from localrun.errors import BadModelFile, BadRequest, ModelNotFound
from localrun.models.store import DamagedFile, Model, Store
from localrun.server.http.exchange import Exchange
from localrun.server.ollama import lines as ollama_lines
from localrun.server.prompting.profile import capabilities
from localrun.server.runtime import Runtime
from localrun.snapshot import EngineRow

# A model's file, resolved, and its adapters.
Files = tuple[Path, tuple[Path, ...]]
# What Ollama shows for a model that never expires: a date that every client can parse.
_FOR_EVER_S = 100 * 365 * 24 * 3600.0


async def tags(runtime: Runtime, exchange: Exchange) -> None:
    """GET /api/tags."""
    # By their files: a model that has several names runs once.
    residents = [resident for resident in runtime.supervisor.residents() if resident.is_loaded]
    loaded = {(resident.key, resident.model.adapters) for resident in residents}
    rows, unusable = await asyncio.to_thread(_tags_rows, runtime.store, loaded)
    await exchange.answer_json({"models": rows, "unusable": unusable})


async def ps(runtime: Runtime, exchange: Exchange) -> None:
    """GET /api/ps: the models that are loaded."""
    engines = [engine for engine in runtime.supervisor.loaded() if engine.state == "ready"]
    await exchange.answer_json({"models": await asyncio.to_thread(_ps_rows, runtime.store, engines)})


def _tags_rows(store: Store, loaded: set[Files]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """In a thread: reads the folders, and new headers. Rows of the models, and what cannot be used, with the reason."""
    rows, unusable = [], []
    for found in store.survey():
        # A file that goes away between the listing and its digest is not worth an error.
        if isinstance(found, DamagedFile):
            unusable.append({"path": str(found.path), "problem": found.problem})
            continue
        with suppress(BadModelFile):
            rows.append(_tags_row(found) | {"loaded": (found.path.resolve(), found.adapters) in loaded})
    return rows, unusable


def _ps_rows(store: Store, engines: list[EngineRow]) -> list[dict[str, Any]]:
    """In a thread. A loaded model whose file is gone still runs, but there is nothing left to say about it."""
    by_name: dict[str, list[EngineRow]] = {}
    for engine in engines:
        by_name.setdefault(engine.model, []).append(engine)
    rows = []
    for name, its_engines in by_name.items():
        with suppress(BadModelFile, ModelNotFound, BadRequest):
            rows.append(_ps_row(its_engines, store.resolve(name)))
    return rows


def _tags_row(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": model.modified_at.isoformat(),
        "size": model.size_bytes,
        "digest": model.digest,
        "details": details(model),
        "capabilities": capabilities(model),
        "source": _source(model),
    }


def _source(model: Model) -> str:
    """Where it came from, in a few words."""
    source = model.source
    named = source.repo or source.file
    return named if source.kind in ("hub", "registry") else source.kind


def _ps_row(engines: Sequence[EngineRow], model: Model) -> dict[str, Any]:
    """One row for a model, also if it is loaded twice: for text and for embeddings."""
    remaining_s = max(_FOR_EVER_S if engine.expires_in_s is None else engine.expires_in_s for engine in engines)
    return {
        "name": model.name,
        "model": model.name,
        "size": sum(engine.size_bytes for engine in engines),
        "digest": model.digest,
        "details": details(model),
        "expires_at": ollama_lines.rfc3339(round((time.time() + remaining_s) * 1e9)).decode("ascii"),
        "size_vram": sum(map(_vram_bytes, engines)),
        "context_length": max(engine.n_ctx for engine in engines),
    }


def _vram_bytes(engine: EngineRow) -> int:
    """What of it lies in a GPU's memory. The engine's name for its backend tells whether it uses one."""
    return engine.size_bytes if engine.backend.endswith("GPU") else 0


def details(model: Model) -> dict[str, Any]:
    """Ollama's `details`."""
    header = model.header
    return {
        "parent_model": model.source.file if model.source.kind == "create" else "",
        "format": "gguf",
        "family": header.architecture,
        "families": [header.architecture],
        "parameter_size": parameter_size(header.n_params),
        "quantization_level": header.quantization,
        "context_length": header.n_ctx_train,
        "embedding_length": header.n_embd,
    }


def parameter_size(n_params: int) -> str:
    """As people say it: 8.0B, 134.5M, 2.4M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n_params >= size:
            return f"{n_params / size:.1f}{unit}"
    return str(n_params)
