"""What Ollama's API tells of models: `/api/tags`, `/api/ps`, `/api/show`.

Answered from file headers that the store keeps in memory; none of them loads a model, and many at once cost little.
Beside Ollama's fields `show` has under `localrun` what they have no place for: files, source, the quantization of each
tensor type, and the memory that the model takes at several contexts.
Ollama's API has no place for adapters: they stand in a list of their own, and most of what is said of one is under
`localrun`.
Does not: read or hash weights. `digest` identifies a model's state on this machine (models/storage/store.py), and is no
content hash.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from localrun.config import Settings
from localrun.errors import BadModelFile, BadRequest, ModelNotFound, NotFound
from localrun.models import adapters, memory, modelfile
from localrun.models.adapters import AdaptedModel
from localrun.models.gguf import projectors
from localrun.models.gguf.header import Header
from localrun.models.memory import projector_memory
from localrun.models.name import split_adapters
from localrun.models.storage.manifest import DamagedFile, Source, in_full
from localrun.models.storage.model import Forecast, Model, NamedAdapter, Origin, Part, kept_forecast
from localrun.models.storage.store import Store
from localrun.server.engines.resident import own_draft
from localrun.server.http.access import Caller
from localrun.server.http.exchange import Exchange
from localrun.server.ollama.bodies import ModelBody
from localrun.server.ollama.chat import rfc3339
from localrun.server.prompting.profile import capabilities
from localrun.server.runtime import Runtime
from localrun.snapshot import EngineRow
from localrun.visible import visible

# A model's file, resolved, and its adapters and projector.
Files = tuple[Path, tuple[Part, ...]]
# What Ollama shows for a model that never expires: a date that every client can parse.
_FOR_EVER_S = 100 * 365 * 24 * 3600.0


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """A model in short."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int


class TagRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model that is here; with `tier` a name that stands for two, told of as the large one. `loaded_as` is the name
    that it has in `/api/ps`: one that has several names runs once. `forecast` is what `localrun plan` last said."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    capabilities: tuple[str, ...]
    source: str
    loaded: bool
    loaded_as: str = ""
    forecast: Forecast | UnsetType = UNSET
    tier: dict[str, Any] | UnsetType = UNSET


class AdapterTag(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter that is here. `kind` is `adapter` or `control vector`, `architecture` that of the models that it is
    for, "" where a control vector does not say. `rank` is 0 for a control vector. `digest` is that of the content, ""
    where it was not needed yet."""

    name: str
    kind: str
    architecture: str
    rank: int
    modified_at: str
    size: int
    digest: str
    source: str


class UnusableFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is no usable model, and why."""

    path: str
    problem: str


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """The models that are here, and the adapters that can be asked for with them (`model+adapter`)."""

    models: list[TagRow]
    adapters: list[AdapterTag]
    unusable: list[UnusableFile]


class PsRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model that is loaded."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class Ps(msgspec.Struct, frozen=True, kw_only=True):
    """The models that are loaded."""

    models: list[PsRow]


class ShowMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One of a model's own first messages."""

    role: str
    content: str


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the file; with `verbose`."""

    name: str
    type: str
    shape: list[int]


class Show(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a model. `model_info` is the metadata of its file under its own keys, and `projector_info`
    that of its projector; `localrun` has its path, types of tensors and the memory that it needs at several contexts.
    """

    license: str
    modelfile: str
    parameters: str
    template: str
    system: str
    details: Details
    messages: list[ShowMessage]
    model_info: dict[str, Any]
    capabilities: tuple[str, ...]
    modified_at: str
    requires: str
    localrun: dict[str, Any]
    projector_info: dict[str, Any] | UnsetType = UNSET
    tensors: list[Tensor] | UnsetType = UNSET


async def tags(runtime: Runtime, exchange: Exchange) -> None:
    # By their files: a model that has several names runs once.
    residents = [resident for resident in runtime.supervisor.residents() if resident.is_loaded]
    sees = exchange.caller.may_use_model
    loaded = {
        (resident.key, resident.model.parts): model.full_name if sees(model.name) else ""
        for resident in residents
        for model in (resident.model,)
    }
    there = {row.model for row in runtime.rows_elsewhere() if row.state == "ready"}
    await exchange.answer_redacted(await asyncio.to_thread(_tags, runtime, loaded, there, exchange.caller))


async def ps(runtime: Runtime, exchange: Exchange) -> None:
    sees = exchange.caller.may_use_model
    engines = [engine for engine in runtime.engine_rows() if engine.state == "ready" and sees(engine.model)]
    rows = await asyncio.to_thread(_ps_rows, runtime.store, engines, exchange.caller)
    await exchange.answer_redacted(Ps(models=rows))


def _tags(runtime: Runtime, loaded: dict[Files, str], there: set[str], caller: Caller) -> Tags:
    """In a thread: reads the folders, and new headers. What cannot be used comes with the reason. Of what is loaded on
    other machines, `there`, the names are known."""
    rows, named, unusable = list[TagRow](), list[AdapterTag](), list[UnusableFile]()
    for found in runtime.store.survey():
        if not isinstance(found, DamagedFile) and not runtime.targets.can_see(caller, found.name):
            continue
        if isinstance(found, NamedAdapter):
            named.append(_adapter_tag(found))
            continue
        # A file that goes away between the listing and its digest is not worth an error.
        if isinstance(found, DamagedFile):
            unusable.append(UnusableFile(path=visible(str(found.path)), problem=visible(found.problem)))
            continue
        with suppress(BadModelFile):
            files = _files(runtime, found) if loaded else None
            loaded_as = found.full_name if found.name in there else None if files is None else loaded.get(files)
            rows.append(_tags_row(found, caller, is_loaded=loaded_as is not None, loaded_as=loaded_as or ""))
    for tier in runtime.settings.tiers:
        if not runtime.targets.can_see(caller, tier.name):
            continue
        try:
            row = _tags_row(runtime.targets.of_tier(tier).model, caller, is_loaded=False)
            name = in_full(tier.name)
            rows.append(msgspec.structs.replace(row, name=name, model=name, size=0, source="tier", tier=tier.rules))
        except (BadModelFile, BadRequest, NotFound) as error:
            unusable.append(UnusableFile(path=tier.source, problem=error.message))
    return Tags(models=rows, adapters=named, unusable=unusable if caller.is_admin else [])


def _files(runtime: Runtime, model: Model) -> Files | None:
    """What it is loaded with; None when its table in the settings file keeps it from that."""
    with suppress(BadModelFile):
        return model.path.resolve(), adapters.opened(runtime.store, runtime.settings, model).parts
    return None


def _ps_rows(store: Store, engines: list[EngineRow], caller: Caller) -> list[PsRow]:
    """In a thread. A loaded model whose file is gone still runs, but there is nothing left to say about it."""
    by_name: dict[str, list[EngineRow]] = {}
    for engine in engines:
        by_name.setdefault(engine.model, []).append(engine)
    rows = []
    for name, its_engines in by_name.items():
        with suppress(BadModelFile, ModelNotFound, BadRequest):
            rows.append(_ps_row(its_engines, store.resolve(name), caller))
    return rows


def _tags_row(model: Model, caller: Caller, *, is_loaded: bool, loaded_as: str = "") -> TagRow:
    name = model.full_name
    return TagRow(
        name=name,
        model=name,
        modified_at=model.modified_at.isoformat(),
        size=model.size_bytes,
        digest=model.digest,
        details=_details(model, caller),
        capabilities=capabilities(model),
        source=_source(model),
        loaded=is_loaded,
        loaded_as=loaded_as,
        forecast=kept_forecast(model.digest) or UNSET,
    )


def _adapter_tag(adapter: NamedAdapter) -> AdapterTag:
    facts = adapter.facts
    return AdapterTag(
        name=adapter.name,
        kind=facts.kind,
        architecture=facts.architecture,
        rank=facts.rank,
        modified_at=adapter.modified_at.isoformat(),
        size=adapter.size_bytes,
        digest=adapter.file.digest,
        source=_source(adapter),
    )


def _source(model: Model | NamedAdapter) -> str:
    """Where it came from, in a few words."""
    source = model.source
    if source.kind == Origin.FOREIGN:
        # Of Ollama's the store, of others the file's folder.
        folder = Path(source.file) if model.manifest else Path(source.file).parent
        return f"{source.repo} {folder}".strip()
    named = source.repo or source.file
    is_here = model.origin != Origin.CLUSTER
    return (named if source.kind in ("hub", "registry") else source.kind) if is_here else Origin.CLUSTER.value


def _ps_row(engines: Sequence[EngineRow], model: Model, caller: Caller) -> PsRow:
    """One row for a model, also if it is loaded twice: for text and for embeddings."""
    remaining_s = max(_FOR_EVER_S if engine.expires_in_s is None else engine.expires_in_s for engine in engines)
    name = model.full_name
    return PsRow(
        name=name,
        model=name,
        size=sum(engine.size_bytes for engine in engines),
        digest=model.digest,
        details=_details(model, caller),
        expires_at=rfc3339(round((time.time() + remaining_s) * 1e9)).decode("ascii"),
        size_vram=sum(engine.gpu_bytes for engine in engines),
        context_length=max(engine.n_ctx for engine in engines),
    )


def _details(model: Model, caller: Caller) -> Details:
    header = model.header
    return Details(
        parent_model=_source_shown(model, caller).file if model.source.kind == "create" else "",
        format="gguf",
        family=header.architecture,
        # Ollama's name for a projector's family, and the architecture in its file.
        families=[header.architecture, *(["clip"] if model.projector else [])],
        parameter_size=parameter_size(header.n_params),
        quantization_level=header.quantization,
        context_length=header.n_ctx_train,
        embedding_length=header.n_embd,
    )


def _source_shown(model: Model, caller: Caller) -> Source:
    """Without the name of the model that it was made of, where the key may not use that one."""
    source = model.source
    is_hidden = source.kind == "create" and not caller.may_use_model(source.file)
    return msgspec.structs.replace(source, file="") if is_hidden else source


def parameter_size(n_params: int) -> str:
    """As people say it: 8.0B, 134.5M, 2.4M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n_params >= size:
            return f"{n_params / size:.1f}{unit}"
    return str(n_params)


# Contexts, in tokens, at which the memory of a model is estimated, as far as it was trained for them; and its own.
CONTEXTS = (4_096, 16_384, 65_536)
# Texts in the metadata that are answered under another name, or that nobody reads twice.
_NOT_IN_MODEL_INFO = frozenset({"tokenizer.chat_template", "general.license.text"})
# The width of the names in `parameters`: Ollama's, which clients take apart by white space.
_NAME_WIDTH = 30
# A comment in Jinja.
_FILLS_IN = "{#- .Suffix -#}"


async def show(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(ModelBody)
    answer = await asyncio.to_thread(_shown, runtime, body, runtime.contexts(), exchange.caller)
    await exchange.answer_redacted(answer)


def _shown(runtime: Runtime, body: ModelBody, loaded: dict[str, int], caller: Caller) -> Show:
    """In a thread: reads the store. Of `model+adapter` the model, with the adapter among its own. Who is no admin is
    told the model's name in place of its path, and of no draft model that the key may not use."""
    name = body.model_name
    if runtime.targets.tier(caller, name) is None and not split_adapters(name).adapters:
        found = runtime.store.find(name)
        if isinstance(found, NamedAdapter):
            return _shown_adapter(found, caller, is_verbose=bool(body.verbose))
    _, adapted, tier = runtime.targets.find(caller, name)
    model = adapted.model
    header, said = model.header, model.manifest
    licence = _licence(model)
    tensors = _tensors(header) if body.verbose else UNSET
    return Show(
        license=licence,
        modelfile=_modelfile(model, licence, caller),
        parameters=_parameters(model, loaded.get(model.name)),
        template=_template(model),
        system=model.system,
        details=_details(model, caller),
        messages=[ShowMessage(role=message.role, content=message.content) for message in model.messages],
        model_info=_model_info(header),
        capabilities=capabilities(model),
        modified_at=model.modified_at.isoformat(),
        requires=said.requires if said else "",
        localrun=_more(runtime, adapted, caller)
        | ({} if tier is None else {"tier": {"name": tier.name, **tier.rules}}),
        projector_info=UNSET if model.projector_header is None else _model_info(model.projector_header),
        tensors=tensors,
    )


def _shown_adapter(adapter: NamedAdapter, caller: Caller, *, is_verbose: bool) -> Show:
    """An adapter in the same form. It has no capabilities: nothing can be asked of it alone."""
    header = adapter.header
    family = adapter.facts.architecture
    return Show(
        license=_licence(adapter),
        modelfile=modelfile.write(
            adapters=[_where(adapter.path, caller)], licence=adapter.manifest.licence_text if adapter.manifest else ""
        ),
        parameters="",
        template="",
        system="",
        details=Details(
            parent_model=adapter.facts.base,
            format="gguf",
            family=family,
            families=[family] if family else [],
            parameter_size=parameter_size(header.n_params),
            quantization_level=header.quantization,
            context_length=0,
            embedding_length=0,
        ),
        messages=[],
        model_info=_model_info(header),
        capabilities=(),
        modified_at=adapter.modified_at.isoformat(),
        requires="",
        localrun=_more_of_adapter(adapter),
        tensors=_tensors(header) if is_verbose else UNSET,
    )


def _more_of_adapter(adapter: NamedAdapter) -> dict[str, Any]:
    """`localrun` of `/api/show`. Raises BadModelFile when the file is gone."""
    facts = adapter.facts
    return {
        "name": adapter.name,
        "kind": facts.kind,
        "path": str(adapter.path),
        "size": adapter.size_bytes,
        "digest": f"sha256:{adapter.sha256}",
        "source": msgspec.to_builtins(adapter.source),
        "architecture": facts.architecture,
        "rank": facts.rank,
        "alpha": facts.alpha,
        "base_model": facts.base,
        "layers": facts.n_layers,
        "tensors": len(adapter.header.tensors),
    }


def _licence(found: Model | NamedAdapter) -> str:
    own = found.manifest.licence_text if found.manifest else ""
    return own or found.header.text("general.license.text") or found.header.text("general.license")


def _tensors(header: Header) -> list[Tensor]:
    return [Tensor(name=tensor.name, type=tensor.type_name, shape=list(tensor.shape)) for tensor in header.tensors]


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


def _modelfile(model: Model, licence: str, caller: Caller) -> str:
    is_elsewhere = model.origin is Origin.CLUSTER
    return modelfile.write(
        base=model.name if is_elsewhere or not caller.is_admin else str(model.path),
        projector=_where(model.projector, caller) if model.projector and not is_elsewhere else "",
        adapters=[] if is_elsewhere else [_where(adapter.path, caller) for adapter in model.adapters],
        draft=model.draft if caller.may_use_model(model.draft) else "",
        template=model.template,
        parameters=model.parameters,
        system=model.system,
        messages=[(message.role, message.content) for message in model.messages],
        licence=licence if model.manifest else "",
        requires=model.manifest.requires if model.manifest else "",
    )


def _where(path: Path, caller: Caller) -> str:
    return str(path) if caller.is_admin else path.name


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


def _more(runtime: Runtime, adapted: AdaptedModel, caller: Caller) -> dict[str, Any]:
    model, header = adapted.model, adapted.model.header
    settings, load = runtime.settings, runtime.supervisor.loads.asked(model)
    draft = own_draft(settings, model)
    no_adapters, notes = "", tuple[str, ...]()
    with suppress(BadModelFile):
        notes = model.notes
    try:
        opened = adapters.opened(runtime.store, settings, model)
    except BadModelFile as error:
        opened, no_adapters = model, error.message
    n_tensors: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        n_tensors[tensor.type_name] += 1
        weights[tensor.type_name] += tensor.n_elements
        sizes[tensor.type_name] += tensor.size_bytes
    return {
        "name": model.name,
        "path": str(model.path) if caller.is_admin else model.name,
        "size": model.size_bytes,
        "digest": model.digest,
        "source": msgspec.to_builtins(_source_shown(model, caller)),
        "adapters": [*(str(its.path) for its in opened.adapters), *(str(its.path) for its in adapted.named)],
        "no_adapters": no_adapters,
        "notes": notes,
        "projector": _projector(model),
        "no_projector": model.no_projector,
        "draft": draft if caller.may_use_model(draft) else "",
        "load": caller.load_shown(load.said),
        "tensor_types": [
            {"type": kind, "tensors": n_tensors[kind], "parameters": count, "size": sizes[kind]}
            for kind, count in weights.most_common()
        ],
        "memory": _memory(settings.with_load(load), model, load.num_ctx or 0),
    }


def _projector(model: Model) -> dict[str, Any] | None:
    header = model.projector_header
    if header is None:
        return None
    return {
        "path": str(header.path),
        "size": header.size_bytes,
        "takes": list(model.media),
        "types": [projectors.type_of(header.metadata, encoder) for encoder in model.media],
        "quantization": header.quantization,
    }


def _memory(settings: Settings, model: Model, asked_ctx: int) -> list[dict[str, int]]:
    """Bytes at each context, for one request that uses all of it."""
    header, rows = model.header, []
    projector = model.projector_header
    projector_bytes = 0 if projector is None else projector_memory(projector).total_bytes
    most = max(header.n_ctx_train, asked_ctx)
    for n_ctx in sorted({min(context or most, most) for context in (*CONTEXTS, asked_ctx, most)}):
        needed = memory.estimate(
            header, n_kv_cells=n_ctx, n_slots=1, n_ubatch=settings.batch_tokens, kv_type=settings.plain_kv_type
        )
        rows.append(
            {
                "context": n_ctx,
                "weights": needed.weights_bytes,
                "kv_cache": needed.kv_bytes,
                "compute": needed.compute_bytes,
                "projector": projector_bytes,
                "total": needed.total_bytes + projector_bytes,
            }
        )
    return rows
