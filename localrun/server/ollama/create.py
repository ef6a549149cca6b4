"""POST /api/create: a new model from an existing one, from a file (used in place), or from uploaded blobs; and a name
for an adapter.

Clients say what they want in Ollama's fields, or as the text of a Modelfile (`modelfile`, with `modelfile_folder` for
what is relative in it, and `quantize` beside it); the command line does the latter, so that errors name a line.

The name points to the new model from one moment to the next, at the end; until then, and after any failure, it means
what it meant before. Blobs that the request names are held meanwhile, so that nobody cleans them up.
Does not: know the format of manifests (models/creation.py, naming.py), or quantize (quantizer.py).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from localrun.errors import BadRequest, BadTemplate, ModelNotFound, NotFound, told_of
from localrun.models import creation, fit, modelfile, naming, quant_choice
from localrun.models.creation import Base, Changes
from localrun.models.name import Kind, ModelName
from localrun.models.storage.manifest import Manifest, Message, StoredFile, check_digest
from localrun.models.storage.model import by_marks, name_of
from localrun.models.storage.store import Store
from localrun.server.http.access import Caller
from localrun.server.http.exchange import Exchange, apart, decode_body
from localrun.server.ollama.bodies import Options
from localrun.server.ollama.store import OLLAMA_API_LEVEL, Status, knows_blob, send_statuses
from localrun.server.prompting.ask import ChatRequest
from localrun.server.prompting.prepare import variables_of
from localrun.server.prompting.profile import profile_of
from localrun.server.runtime import Runtime

_ROLES = ("system", "user", "assistant")


class _MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Any] | None = None


class CreateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that this build does not do are parsed, so that a value that asks for something is refused by name."""

    model: str | None = None
    name: str | None = None
    from_: str | None = msgspec.field(default=None, name="from")
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    parameters: dict[str, Any] | None = None
    system: str | None = None
    template: str | None = None
    messages: list[_MessageBody] | None = None
    license: str | list[str] | None = None
    requires: str | None = None
    draft: str | None = None
    quantize: str | None = None
    quantization: str | None = None
    modelfile: str | None = None
    modelfile_folder: str | None = None
    stream: bool | None = None
    draft_files: dict[str, str] | None = None
    draft_quantize: str | None = None
    renderer: str | None = None
    parser: str | None = None
    remote_host: str | None = None


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to make. The base is `base` (FROM), or the uploaded `files`; without either it is one adapter that gets a
    name. `adapters` are digests, paths or names; `projector` is a digest or a path, or "none"; `draft` is a model's
    name or a path: "" for none. None means the base's. `left_out` is what was said that has no effect here."""

    name: str
    base: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    projector: str | None = None
    folder: Path | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    template: str | None = None
    messages: tuple[Message, ...] | None = None
    licence_text: str | None = None
    requires: str = ""
    draft: str | None = None
    quantize: str = ""
    left_out: tuple[str, ...] = ()


def order_of(body: CreateBody) -> Order:
    """Raises BadRequest naming the field, or the line of the Modelfile."""
    name = body.model or body.name
    if not name:
        raise BadRequest("model is required", field="model")
    for unsupported in ("draft_files", "draft_quantize", "remote_host"):
        if getattr(body, unsupported):
            raise BadRequest.of(unsupported, "this is not supported; leave it out")
    quantize = body.quantize or body.quantization or ""
    if quantize:
        creation.quantization_number(quantize)
    if body.modelfile:
        return _of_modelfile(name, modelfile.parse(body.modelfile), _folder(body.modelfile_folder), quantize)
    if bool(body.from_) == bool(body.files) and (body.from_ or not body.adapters):
        raise BadRequest.of(
            "from", "give either from (the name of a model that is here, or a path) or files (uploaded ones)"
        )
    for file_name in (*(body.files or {}), *(body.adapters or {})):
        creation.check_file_name(file_name)
    with told_of("parameters", instead_of="parameters"):
        parameters = _checked(body.parameters or {})
    licences = [body.license] if isinstance(body.license, str) else body.license
    return Order(
        name=name,
        base=body.from_ or "",
        files=body.files or {},
        adapters=tuple((body.adapters or {}).values()),
        parameters=parameters,
        system=body.system,
        template=body.template or None,
        left_out=tuple(name for name in ("renderer", "parser") if getattr(body, name)),
        messages=None if body.messages is None else tuple(_message(*each) for each in enumerate(body.messages)),
        licence_text="\n\n".join(licences) if licences else None,
        requires=body.requires or "",
        draft=body.draft,
        quantize=quantize,
    )


def _of_modelfile(name: str, said: modelfile.Modelfile, folder: Path | None, quantize: str) -> Order:
    asked: dict[str, Any] = {}
    for parameter in said.parameters:
        try:
            _take(asked, parameter)
        except BadRequest as error:
            modelfile.fail(parameter.number, error.message)
    return Order(
        name=name,
        base=said.base.text if said.base else "",
        adapters=tuple(line.text for line in said.adapters),
        projector=said.projector.text if said.projector else None,
        folder=folder,
        parameters=asked,
        system=said.system.text if said.system else None,
        template=said.template.text if said.template else None,
        messages=tuple(Message(line.role, line.text) for line in said.messages) or None,
        licence_text="\n\n".join(line.text for line in said.licences) or None,
        requires=said.requires.text if said.requires else "",
        draft=said.draft.text if said.draft else None,
        left_out=said.left_out,
        quantize=quantize,
    )


def _take(asked: dict[str, Any], parameter: modelfile.Parameter) -> None:
    value = modelfile.parameter_value(parameter.name, parameter.text)
    if parameter.name in modelfile.TEXT_PARAMETERS:
        value = [*asked.get(parameter.name, []), value]
    asked |= _checked({parameter.name: value})


class _Parameters(msgspec.Struct):
    parameters: Options


def _checked(asked: Mapping[str, Any]) -> dict[str, Any]:
    """With the limits that requests have: what no request may ask for is no default either."""
    kept = modelfile.normalized_parameters(asked)
    decode_body(msgspec.json.encode({"parameters": kept}), _Parameters)
    return kept


def _message(index: int, body: _MessageBody) -> Message:
    where = f"messages[{index}]"
    if body.role not in _ROLES:
        raise BadRequest.of(f"{where}.role", f"{body.role[:40]!r} is no role; use {', '.join(_ROLES)}")
    for what in ("images", "tool_calls"):
        if getattr(body, what):
            raise BadRequest.of(f"{where}.{what}", "a model's own messages have text only")
    return Message(body.role, body.content or "")


def _folder(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text)
    if not path.is_absolute() or "\0" in text:
        raise BadRequest.of("modelfile_folder", "give an absolute path")
    return path


_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")
_DIGEST = re.compile(r"@?(sha256[:-][0-9A-F]{64})", re.IGNORECASE)


async def create(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(CreateBody)
    async with exchange.while_connected():
        await send_statuses(exchange, _steps(runtime, body, exchange.caller), stream=body.stream is not False)


async def _steps(runtime: Runtime, body: CreateBody, caller: Caller) -> AsyncGenerator[Status, None]:
    store = runtime.store
    order = await apart(order_of, body)
    runtime.targets.check_own(caller, order.name)
    if runtime.settings.tier(order.base) is not None:
        runtime.targets.check_own(caller, order.base, "from")
    check_requires(order.requires)
    await asyncio.to_thread(naming.check_free, store, order.name)
    left_out, template = list(order.left_out), order.template
    if template and creation.is_go(template):
        left_out, template = [*left_out, "the Go template"], None
    if template:
        await check_template(runtime, template)
    said = (order.base, order.projector or "", *order.adapters, *order.files.values())
    for name in (order.name, order.base, order.draft, *order.adapters):
        if name and not _DIGEST.fullmatch(name):
            caller.check_model(name)
    for name in said:
        caller.check_file(name)
    digests = [check_digest(match[1]) for text in said if (match := _DIGEST.fullmatch(text))]
    for digest in digests:
        if not knows_blob(runtime, caller, digest):
            raise NotFound(f"{digest} is not here; upload it first (POST /api/blobs/{digest})", field="files")
    with store.blobs.held(digests):
        adapter = await asyncio.to_thread(_adapter_alone, store, order)
        if adapter is not None:
            yield {"status": "writing manifest"}
            await asyncio.to_thread(naming.point, store, order.name, adapter)
            yield {"status": "success"}
            return
        try:
            base = await asyncio.to_thread(_base, store, order)
        except ModelNotFound as missing:
            if missing.reason or order.files or ModelName.parse(order.base).kind is not Kind.STORED:
                raise
            with runtime.pulls.joined(order.base, is_trusted=caller.is_admin) as progress:  # as Ollama does
                async for status in progress.statuses():
                    if status != {"status": "success"}:
                        yield status
            base = await asyncio.to_thread(_base, store, order)
        check_load(base, order.parameters)
        if left_out:
            instead = "the model's own chat template is used"
            if not (base.manifest.template or base.header.chat_template):
                template = template or by_marks(order.template or "") or None
                instead = f"that of {name_of(template)} is used, as its marks say" if template else "nothing reads it"
            yield {"status": f"leaving out {' and '.join(left_out)}: {instead}"}
        adapters = await asyncio.to_thread(_adapters, store, base, order)
        projector = await asyncio.to_thread(_projector, store, base, order)
        draft = order.draft
        if draft:
            draft = await asyncio.to_thread(creation.draft_name, store, base, draft, order.folder)
        yield {"status": "reading model metadata"}
        quantized = None
        if order.quantize:
            async with aclosing(_quantized(runtime, base, order.quantize)) as steps:
                async for step in steps:
                    if isinstance(step, StoredFile):
                        quantized = step
                    else:
                        yield step
        changes = Changes(
            parameters=order.parameters,
            system=order.system,
            template=template,
            messages=order.messages,
            licence_text=order.licence_text,
            requires=order.requires or None,
            draft=draft,
            adapters=adapters,
            projector=projector,
        )
        made = creation.assemble(base, changes, now=datetime.now(UTC), quantized=quantized)
        # Its blob belongs to nobody until the manifest is there.
        with store.blobs.held([file.digest for file in made.files if file.digest]):
            for file in made.files:
                yield {"status": f"using existing layer {file.digest or store.path_of(file)}"}
            yield {"status": "writing manifest"}
            await asyncio.to_thread(naming.point, store, order.name, made)
            for note in await asyncio.to_thread(lambda: store.model_of(made).notes):
                yield {"status": note}
    yield {"status": "success"}


async def _quantized(runtime: Runtime, base: Base, name: str) -> AsyncGenerator[Status | StoredFile, None]:
    creation.check_quantizable(base.header, base.name)
    number = creation.quantization_number(name)
    said = f"quantizing {base.header.quantization} model to {creation.canonical_quantization(name)}"
    size_bytes = base.header.size_bytes
    expected_bytes = creation.quantized_bytes(base.header, name)
    async with aclosing(runtime.quantizer.quantize(base.path, number, expected_bytes=expected_bytes)) as steps:
        async for step in steps:
            # Bytes of the source, since clients' progress bars expect bytes; what is counted are tensors.
            done = size_bytes * step.n_done // step.n_total if step.n_total else 0
            yield {"status": said, "digest": said, "total": size_bytes, "completed": done}
            if step.result is not None:
                yield step.result


def check_requires(requires: str) -> None:
    """Raises BadRequest when a model needs a newer Ollama than the one whose API this is."""
    if not requires:
        return
    wanted, here = _VERSION.fullmatch(requires.strip()), _VERSION.fullmatch(OLLAMA_API_LEVEL)
    if wanted is None or here is None:
        raise BadRequest.of("requires", f"'{requires[:40]}' is no version; write it as 0.14.0")
    if _numbers(wanted) > _numbers(here):
        raise BadRequest.of(
            "requires",
            f"the model asks for Ollama {requires}, and this localrun does what {OLLAMA_API_LEVEL} does; "
            f"update localrun, or leave REQUIRES out",
        )


def check_load(base: Base, parameters: Mapping[str, Any]) -> None:
    """Raises BadRequest when the model cannot be loaded as the parameters say, which may be the base's in part."""
    if any(name in modelfile.LOAD_PARAMETERS for name in parameters):
        try:
            said = modelfile.load_settings({**base.manifest.parameters, **parameters})
        except ValueError as error:
            raise BadRequest(f"parameters.{error}", field="parameters") from None
        fit.check_load(base.header, said, base.name)


async def check_template(runtime: Runtime, template: str) -> None:
    """Raises BadTemplate for a template that is broken. One that only refuses this conversation is a good one."""
    ask = ChatRequest(messages=({"role": "user", "content": "Hello"},))
    given = {"messages": ask.messages, "add_generation_prompt": True, "bos_token": "", "eos_token": ""}
    given |= variables_of(ask, profile_of(template))
    problem: BadTemplate | None = None
    no_tools: tuple[list[Any] | None, ...] = (None, [])
    for tools in no_tools:  # some go through a list of tools without asking whether there is one
        try:
            await runtime.renderer.render(template, given | {"tools": tools}, ())
        except BadTemplate as error:
            problem = problem or error
        except BadRequest:
            return
        else:
            return
    assert problem is not None
    raise problem


def _base(store: Store, order: Order) -> Base:
    if order.files:
        return creation.base_of_files(store, order.files)
    with told_of("from"):
        return creation.base_of(store, order.base, order.folder)


def _adapters(store: Store, base: Base, order: Order) -> tuple[StoredFile, ...]:
    return creation.adapters(store, base, order.adapters, order.folder) if order.adapters else ()


def _projector(store: Store, base: Base, order: Order) -> tuple[StoredFile, ...] | None:
    """None for the base's."""
    if order.projector is None:
        return None
    if order.projector.lower() == quant_choice.NO_PROJECTOR:
        return ()
    return (creation.projector(store, base, order.projector, order.folder),)


def _adapter_alone(store: Store, order: Order) -> Manifest | None:
    """The manifest of an adapter that gets a name of its own; None for a model. Raises BadRequest for what an adapter
    does not have, and what reading it raises."""
    files = (*order.files.values(), *([order.base] if order.base else []))
    text = files[0] if len(files) == 1 else ""
    if files and not (text and creation.is_adapter(store, text, order.folder)):
        return None
    own = ("parameters", "system", "template", "messages", "projector", "draft", "quantize")
    for name in own if not files else ("adapters", *own):
        if getattr(order, name):
            raise BadRequest.of(name, "this is an adapter without a model, which has none; leave it out")
    if not files and len(order.adapters) > 1:
        raise BadRequest.of("adapters", "give from or files, or one adapter to be named by itself")
    return creation.named_adapter(
        store, text or order.adapters[0], order.folder, licence_text=order.licence_text, now=datetime.now(UTC)
    )


def _numbers(version: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(part or 0) for part in version.groups())
