"""POST /api/show: everything that is known of a model, without loading it.

Ollama's fields, and under `localrun` what they have no place for: files, source, the quantization of each tensor type,
and the memory that the model takes at several contexts. Answered from headers that the store keeps in memory.

Does not: read weights.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec

from localrun.config import Settings
from localrun.models import memory, modelfile
from localrun.models.header import Header
from localrun.models.store import Model
from localrun.server.http import bodies
from localrun.server.http.exchange import Exchange
from localrun.server.ollama.bodies import ModelBody
from localrun.server.ollama.models import details
from localrun.server.prompting.profile import capabilities
from localrun.server.runtime import Runtime

# Contexts, in tokens, at which the memory of a model is estimated, as far as it was trained for them; and its own.
CONTEXTS = (4_096, 16_384, 65_536)
# Texts in the metadata that are answered under another name, or that nobody reads twice.
_NOT_IN_MODEL_INFO = frozenset({"tokenizer.chat_template", "general.license.text"})
# The width of the names in `parameters`: Ollama's, which clients take apart by white space.
_NAME_WIDTH = 30
# A comment in Jinja.
_FILLS_IN = "{#- .Suffix -#}"


async def show(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await bodies.read(exchange, ModelBody)
    loaded = {row.model: row.n_ctx for row in runtime.supervisor.loaded() if row.n_ctx}
    answer = await asyncio.to_thread(_answer, runtime, body, loaded)
    await exchange.answer_json(answer)


def _answer(runtime: Runtime, body: ModelBody, loaded: dict[str, int]) -> dict[str, Any]:
    """In a thread: reads the store."""
    model = runtime.store.resolve(body.model_name)
    header, said = model.header, model.manifest
    licence = (said.licence_text if said else "") or _text(header, "general.license.text")
    licence = licence or _text(header, "general.license")
    answer: dict[str, Any] = {
        "license": licence,
        "modelfile": _modelfile(model, licence),
        "parameters": _parameters(model, loaded.get(model.name)),
        "template": _template(model),
        "system": model.system,
        "details": details(model),
        "messages": [{"role": message.role, "content": message.content} for message in model.messages],
        "model_info": _model_info(header),
        "capabilities": capabilities(model),
        "modified_at": model.modified_at.isoformat(),
        "requires": said.requires if said else "",
        "localrun": _more(runtime.settings, model),
    }
    if body.verbose:
        answer["tensors"] = [
            {"name": tensor.name, "type": tensor.type_name, "shape": list(tensor.shape)} for tensor in header.tensors
        ]
    return answer


def _template(model: Model) -> str:
    """Some editors offer to fill in only where the template has the word that Go templates have for it."""
    template = model.template
    return template + _FILLS_IN if "insert" in capabilities(model) and ".Suffix" not in template else template


def _parameters(model: Model, n_ctx: int | None) -> str:
    values: dict[str, Any] = {"num_ctx": n_ctx or model.header.n_ctx_train, **model.parameters}
    lines = []
    for name, value in values.items():
        for each in value if isinstance(value, list | tuple) else (value,):
            shown = msgspec.json.encode(each).decode()
            lines.append(f"{name:<{_NAME_WIDTH}} {shown}")
    return "\n".join(lines)


def _modelfile(model: Model, licence: str) -> str:
    return modelfile.write(
        base=str(model.path),
        adapters=[str(path) for path in model.adapters],
        template=model.template,
        parameters=model.parameters,
        system=model.system,
        messages=[(message.role, message.content) for message in model.messages],
        licence=licence if model.manifest else "",
        requires=model.manifest.requires if model.manifest else "",
    )


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


def _more(settings: Settings, model: Model) -> dict[str, Any]:
    header = model.header
    n_tensors: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        n_tensors[tensor.type_name] += 1
        weights[tensor.type_name] += tensor.n_elements
        sizes[tensor.type_name] += tensor.size_bytes
    return {
        "name": model.name,
        "path": str(model.path),
        "size": model.size_bytes,
        "digest": model.digest,
        "source": msgspec.to_builtins(model.source),
        "adapters": [str(path) for path in model.adapters],
        "tensor_types": [
            {"type": kind, "tensors": n_tensors[kind], "parameters": count, "size": sizes[kind]}
            for kind, count in weights.most_common()
        ],
        "memory": _memory(settings, header),
    }


def _memory(settings: Settings, header: Header) -> list[dict[str, int]]:
    """Bytes at each context, for one request that uses all of it."""
    rows = []
    for n_ctx in sorted({min(context, header.n_ctx_train) for context in (*CONTEXTS, header.n_ctx_train)}):
        needed = memory.estimate(
            header, n_kv_cells=n_ctx, n_slots=1, n_ubatch=settings.batch_tokens, kv_type=settings.plain_kv_type
        )
        rows.append(
            {
                "context": n_ctx,
                "weights": needed.weights_bytes,
                "kv_cache": needed.kv_bytes,
                "compute": needed.compute_bytes,
                "total": needed.total_bytes,
            }
        )
    return rows


def _text(header: Header, key: str) -> str:
    value = header.metadata.get(key)
    return value if isinstance(value, str) else ""
