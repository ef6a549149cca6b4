"""Ollama's views on models: `/api/tags`, `/api/show`, `/api/ps`.

Answered from file headers that the store keeps in memory; none of them loads a model, and many at once cost little.

Does not: hash weights. `digest` identifies a file's state on this machine (see the store), and is no content hash.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import msgspec

from localrun.errors import BadModelFile, BadRequest, ModelNotFound
from localrun.models.header import Header
from localrun.models.store import Model, Store
from localrun.server.http import bodies
from localrun.server.http.exchange import Exchange
from localrun.server.ollama import lines as ollama_lines
from localrun.server.ollama.bodies import ModelBody
from localrun.server.runtime import Runtime
from localrun.snapshot import EngineRow

# Texts in the metadata that are answered under another name, or that nobody reads twice.
_NOT_IN_MODEL_INFO = frozenset({"tokenizer.chat_template", "general.license.text"})
# What Ollama shows for a model that never expires: a date that every client can parse.
_FOR_EVER_S = 100 * 365 * 24 * 3600.0


async def tags(runtime: Runtime, exchange: Exchange) -> None:
    """GET /api/tags."""
    await exchange.answer(msgspec.json.encode({"models": await asyncio.to_thread(_tags_rows, runtime.store)}))


async def show(runtime: Runtime, exchange: Exchange) -> None:
    """POST /api/show."""
    body = bodies.decode(await exchange.read_body(), ModelBody)
    model = await asyncio.to_thread(runtime.store.resolve, body.model_name)
    header = model.header
    n_ctx = next((row.n_ctx for row in runtime.supervisor.loaded() if row.model == model.name and row.n_ctx), None)
    answer: dict[str, Any] = {
        "license": _text(header, "general.license"),
        "modelfile": _modelfile(model, header),
        "parameters": f"num_ctx                        {n_ctx or header.n_ctx_train}",
        "template": header.chat_template or "",
        "details": _details(header),
        "model_info": _model_info(header),
        "capabilities": _capabilities(),
        "modified_at": model.modified_at.isoformat(),
    }
    if body.verbose:
        answer["tensors"] = [
            {"name": tensor.name, "type": tensor.type_name, "shape": list(tensor.shape)} for tensor in header.tensors
        ]
    await exchange.answer(msgspec.json.encode(answer))


async def ps(runtime: Runtime, exchange: Exchange) -> None:
    """GET /api/ps: the models that are loaded."""
    engines = [engine for engine in runtime.supervisor.loaded() if engine.state == "ready"]
    await exchange.answer(msgspec.json.encode({"models": await asyncio.to_thread(_ps_rows, runtime.store, engines)}))


def _tags_rows(store: Store) -> list[dict[str, Any]]:
    """In a thread: reads the folder, and new headers."""
    rows = []
    for model in store.list():
        # A file that goes away between the listing and its digest is not worth an error.
        with suppress(BadModelFile):
            rows.append(_tags_row(model))
    return rows


def _ps_rows(store: Store, engines: list[EngineRow]) -> list[dict[str, Any]]:
    """In a thread. A loaded model whose file is gone still runs, but there is nothing left to say about it."""
    rows = []
    for engine in engines:
        with suppress(BadModelFile, ModelNotFound, BadRequest):
            rows.append(_ps_row(engine, store.resolve(engine.model)))
    return rows


def _tags_row(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": model.modified_at.isoformat(),
        "size": model.size_bytes,
        "digest": model.digest,
        "details": _details(model.header),
        "capabilities": _capabilities(),
    }


def _ps_row(engine: EngineRow, model: Model) -> dict[str, Any]:
    remaining_s = _FOR_EVER_S if engine.expires_in_s is None else engine.expires_in_s
    return {
        "name": model.name,
        "model": model.name,
        "size": engine.size_bytes,
        "digest": model.digest,
        "details": _details(model.header),
        "expires_at": ollama_lines.rfc3339(round((time.time() + remaining_s) * 1e9)).decode("ascii"),
        "size_vram": _vram_bytes(engine),
        "context_length": engine.n_ctx,
    }


def _vram_bytes(engine: EngineRow) -> int:
    """What of it lies in a GPU's memory. The engine's name for its backend tells whether it uses one."""
    return engine.size_bytes if engine.backend.endswith("GPU") else 0


def _capabilities() -> list[str]:
    """The same for every model, until this build does more than complete text."""
    return ["completion"]


def _details(header: Header) -> dict[str, Any]:
    return {
        "parent_model": "",
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


def _model_info(header: Header) -> dict[str, Any]:
    """The metadata under its own keys. Arrays that stay in the file are null, as Ollama has them without `verbose`."""
    info: dict[str, Any] = {
        key: _plain(value) for key, value in header.metadata.items() if key not in _NOT_IN_MODEL_INFO
    }
    info["general.architecture"] = header.architecture
    info.setdefault("general.basename", header.name)
    info["general.parameter_count"] = header.n_params
    return info


def _plain(value: object) -> object:
    if isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return list(value)
    return None


def _modelfile(model: Model, header: Header) -> str:
    lines = ["# Modelfile generated by localrun", f"FROM {model.path}"]
    if header.chat_template:
        lines.append(f'TEMPLATE """{header.chat_template}"""')
    return "\n".join(lines) + "\n"


def _text(header: Header, key: str) -> str:
    value = header.metadata.get(key)
    return value if isinstance(value, str) else ""
