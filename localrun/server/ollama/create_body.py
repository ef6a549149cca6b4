"""The body of POST `/api/create`, and what it asks for: an `Order`.

Clients say what they want in Ollama's fields, or as the text of a Modelfile (`modelfile`, with `modelfile_folder` for
what is relative in it, and `quantize` beside it); the command line does the latter, so that errors name a line.

Pure. Does not: look at files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from localrun.errors import BadRequest
from localrun.models import creation, modelfile, parameters
from localrun.models.manifest import Message
from localrun.server.http import bodies
from localrun.server.ollama.options import Options

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
    """What to make. The base is `base` (FROM), or the uploaded `files`; `adapters` are digests or paths."""

    name: str
    base: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    folder: Path | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    template: str | None = None
    messages: tuple[Message, ...] | None = None
    licence_text: str | None = None
    requires: str = ""
    quantize: str = ""


def order_of(body: CreateBody) -> Order:
    """Raises BadRequest naming the field, or the line of the Modelfile."""
    name = body.model or body.name
    if not name:
        raise BadRequest("model is required", field="model")
    for unsupported in ("draft_files", "draft_quantize", "renderer", "parser", "remote_host"):
        if getattr(body, unsupported):
            raise BadRequest(f"{unsupported}: this is not supported; leave it out", field=unsupported)
    quantize = body.quantize or body.quantization or ""
    if quantize:
        creation.quantization_number(quantize)
    if body.modelfile:
        return _of_modelfile(name, modelfile.parse(body.modelfile), _folder(body.modelfile_folder), quantize)
    if bool(body.from_) == bool(body.files):
        raise BadRequest(
            "from: give either from (the name of a model that is here, or a path) or files (uploaded ones)",
            field="from",
        )
    for file_name in (*(body.files or {}), *(body.adapters or {})):
        creation.check_file_name(file_name)
    if body.template:
        creation.refuse_go(body.template)
    licences = [body.license] if isinstance(body.license, str) else body.license
    return Order(
        name=name,
        base=body.from_ or "",
        files=body.files or {},
        adapters=tuple((body.adapters or {}).values()),
        parameters=_checked(body.parameters or {}),
        system=body.system,
        template=body.template,
        messages=None if body.messages is None else tuple(_message(*each) for each in enumerate(body.messages)),
        licence_text="\n\n".join(licences) if licences else None,
        requires=body.requires or "",
        quantize=quantize,
    )


def _of_modelfile(name: str, said: modelfile.Modelfile, folder: Path | None, quantize: str) -> Order:
    asked: dict[str, Any] = {}
    for parameter in said.parameters:
        _at(parameter.number, _take, asked, parameter)
    if said.template is not None:
        _at(said.template.number, creation.refuse_go, said.template.text)
    return Order(
        name=name,
        base=said.base.text,
        adapters=tuple(line.text for line in said.adapters),
        folder=folder,
        parameters=asked,
        system=said.system.text if said.system else None,
        template=said.template.text if said.template else None,
        messages=tuple(Message(line.role, line.text) for line in said.messages) or None,
        licence_text="\n\n".join(line.text for line in said.licences) or None,
        requires=said.requires.text if said.requires else "",
        quantize=quantize,
    )


def _take(asked: dict[str, Any], parameter: modelfile.Parameter) -> None:
    value = parameters.value_of(parameter.name, parameter.text)
    if parameter.name in parameters.TEXTS:
        value = [*asked.get(parameter.name, []), value]
    asked |= _checked({parameter.name: value})


class _Parameters(msgspec.Struct):
    parameters: Options


def _checked(asked: Mapping[str, Any]) -> dict[str, Any]:
    """With the limits that requests have: what no request may ask for is no default either."""
    kept = parameters.normalized(asked)
    bodies.decode(msgspec.json.encode({"parameters": kept}), _Parameters)
    return kept


def _at(number: int, check: Callable[..., None], *arguments: Any) -> None:
    try:
        check(*arguments)
    except BadRequest as error:
        modelfile.fail(number, error.message)


def _message(index: int, body: _MessageBody) -> Message:
    where = f"messages[{index}]"
    if body.role not in _ROLES:
        raise BadRequest(f"{where}.role: {body.role[:40]!r} is no role; use {', '.join(_ROLES)}", field=f"{where}.role")
    for what in ("images", "tool_calls"):
        if getattr(body, what):
            raise BadRequest(f"{where}.{what}: a model's own messages have text only", field=f"{where}.{what}")
    return Message(body.role, body.content or "")


def _folder(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text)
    if not path.is_absolute() or "\0" in text:
        raise BadRequest("modelfile_folder: give an absolute path", field="modelfile_folder")
    return path
