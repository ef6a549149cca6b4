"""What Ollama's API does to the store: `/api/pull`, `/api/copy`, `/api/delete`, `/api/push`, `/api/blobs/:digest`; and
its version, and what is there of its own services, which is nothing. What is not supported at all is a route that says
so: a client takes a 404 for a missing model.

What lies here without having come from anywhere (the built-in model, files in place, models that were created) is
pulled already; clients pull before they use a model. A name that no model can have is refused before the stream begins;
what goes wrong later is the stream's last line. A model that is removed is unloaded first; requests that run on it end
in peace. What a removal freed and kept is in the answer to DELETE, where Ollama has nothing.

An uploaded file is written as it comes, in pieces that a thread hashes; it has its name when its content has that
digest, and leaves nothing behind when it has not or when the client goes away.
Does not: keep pulls (server/pulls.py), decide what may be removed (models/naming.py), or look at what is in a file.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec

from localrun import __version__
from localrun.errors import BadModelFile, BadRequest, ModelNotFound, NotFound, NotSupported, Unauthorized
from localrun.models import adapters, naming
from localrun.models.name import Kind, ModelName, split_adapters
from localrun.models.storage.blobs import BlobWriter, check_room
from localrun.models.storage.manifest import check_digest
from localrun.models.storage.store import Store
from localrun.server.engines.resident import missing_drafts
from localrun.server.http.access import Caller
from localrun.server.http.exchange import Exchange
from localrun.server.http.path_redaction import redact_paths_in
from localrun.server.ollama.bodies import ModelBody
from localrun.server.runtime import Runtime

Status = dict[str, Any]

_encode = msgspec.json.Encoder().encode


async def send_statuses(exchange: Exchange, statuses: AsyncGenerator[Status, None], *, stream: bool) -> None:
    """Runs the task to its end. Raises what it raises."""
    last: Status = {}
    async with aclosing(statuses):
        async for status in statuses:
            last = status if exchange.caller.is_admin else redact_paths_in(status)
            if stream:
                if not exchange.started:
                    await exchange.open_stream()
                await exchange.write(_encode(last) + b"\n")
    if stream:
        await exchange.close_stream()
    else:
        await exchange.answer(_encode(last))


_PULLED = frozenset(("hub", "registry"))


class PullBody(ModelBody, frozen=True, kw_only=True):
    """`insecure` allows plain http to a registry that is not on this machine. `projector` is the name or the type of
    the projector to fetch with the model, or none. Ollama's `username` and `password` are not read: localrun signs in
    to no registry."""

    insecure: bool | None = None
    projector: str | None = None


async def pull(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(PullBody)
    name = body.model_name
    runtime.targets.check_own(exchange.caller, name)
    stream = body.stream is not False
    is_own = await asyncio.to_thread(_is_own, runtime.store, name)
    async with exchange.while_connected():
        if is_own:
            await send_statuses(exchange, _success(), stream=stream)
            return
        wanted = runtime.pulls.joined(
            name,
            is_insecure=bool(body.insecure),
            projector=body.projector or "",
            is_trusted=exchange.caller.is_admin,
        )
        with wanted as progress:
            await send_statuses(exchange, progress.statuses(), stream=stream)


def _is_own(store: Store, name: str) -> bool:
    """Whether a model or an adapter is here that did not come from a source that could have a newer one. So is a model
    with adapters, if all of them are here.

    Raises NotFound for an adapter that is not, ModelNotFound for the path of a file that is not there, and BadRequest.
    """
    if split_adapters(name).adapters:
        adapters.resolve(store, name)
        return True
    try:
        model = store.find(name)
    except (BadModelFile, ModelNotFound):
        if ModelName.parse(name).kind is Kind.STORED:
            return False
        raise
    return model.source.kind not in _PULLED


async def _success() -> AsyncGenerator[Status, None]:
    yield {"status": "success"}


class CopyBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/copy."""

    source: str
    destination: str


class KeptFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was not deleted, and why."""

    path: str
    reason: str


class DeletedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the removal freed and kept. `notes` say which models miss what was removed."""

    freed_bytes: int
    deleted: list[str]
    kept: list[KeptFile]
    notes: list[str]


async def copy(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(CopyBody)
    runtime.targets.check_own(exchange.caller, body.source, "source")
    runtime.targets.check_own(exchange.caller, body.destination, "destination")
    await asyncio.to_thread(naming.copy, runtime.store, body.source, body.destination)
    await exchange.answer(b"")


async def delete(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(ModelBody)
    name = body.model_name
    runtime.targets.check_own(exchange.caller, name)
    await asyncio.to_thread(naming.check_removable, runtime.store, name)
    # A model whose file is damaged or gone is not loaded under this name, and may be removed all the same.
    with suppress(ModelNotFound, BadModelFile, BadRequest):
        await runtime.supervisor.unload(name, has_other_names=False)
    missed = await asyncio.to_thread(missing_drafts, runtime.settings, runtime.store)
    refused_before = await asyncio.to_thread(adapters.refused, runtime.store, runtime.settings)
    removed = await asyncio.to_thread(naming.remove, runtime.store, name)
    misses = await asyncio.to_thread(missing_drafts, runtime.settings, runtime.store)
    refused = await asyncio.to_thread(adapters.refused, runtime.store, runtime.settings)
    notes = [
        f"'{model}' runs without its draft model '{draft}' from its next load on; give it another one, or none, with "
        f"DRAFT in a Modelfile (localrun create)"
        for model, draft in misses.items()
        if model not in missed
    ]
    notes += [
        f"requests to '{model}' are refused from now on: {why}"
        for model, why in refused.items()
        if model not in refused_before
    ]
    await exchange.answer_redacted(
        DeletedModel(
            freed_bytes=removed.freed_bytes,
            deleted=[str(path) for path in removed.files],
            kept=[KeptFile(path=str(kept.path), reason=kept.reason) for kept in removed.kept],
            notes=notes,
        )
    )


async def push(_: Runtime, exchange: Exchange) -> None:
    await exchange.read_body()
    raise NotSupported(
        "push: uploading models is not supported; share the GGUF file itself (localrun show MODEL names it), for "
        "example with `hf upload` to a repository of your own on the Hugging Face hub"
    )


async def blob(runtime: Runtime, exchange: Exchange) -> None:
    digest = check_digest(exchange.scope["path_params"]["digest"], field="digest")
    is_here = await asyncio.to_thread(runtime.store.blobs.has, digest)
    is_known = is_here and knows_blob(runtime, exchange.caller, digest)
    if exchange.scope["method"] == "HEAD":
        if not is_known:
            raise NotFound(f"{digest} is not here", field="digest")
        await exchange.answer(b"")
        return
    if is_known:
        # Read all the same: a client whose sending is cut off does not look at the answer.
        async for _ in exchange.pieces():
            pass
        await exchange.answer(b"")
        return
    if is_here:
        hashed = hashlib.sha256()
        async for piece in exchange.large_pieces():
            await asyncio.to_thread(hashed.update, piece)
        if digest != f"sha256:{hashed.hexdigest()}":
            raise BadRequest(f"the content has the digest sha256:{hashed.hexdigest()}, not {digest}", field="digest")
        await _is_sent(runtime, exchange, digest)
        return
    folder = runtime.store.blobs.folder
    await asyncio.to_thread(check_room, folder, exchange.announced_bytes)
    with BlobWriter(runtime.store.blobs) as writer:
        async for piece in exchange.large_pieces():
            await asyncio.to_thread(_write, writer, piece, folder)
        await asyncio.to_thread(writer.finish, digest)
    await _is_sent(runtime, exchange, digest)


def knows_blob(runtime: Runtime, caller: Caller, digest: str) -> bool:
    """Whether it may use a file that is here. A key that may not use all models knows of those that it has sent: the
    digest of a model is no secret, and would be a way around its name."""
    key = caller.key
    return key is None or not key.models or (key.id, digest) in runtime.sent_blobs


async def _is_sent(runtime: Runtime, exchange: Exchange, digest: str) -> None:
    runtime.sent_blobs.add((exchange.caller.id, digest))
    await exchange.answer(b"", status=201)


def _write(writer: BlobWriter, piece: bytes, folder: Path) -> None:
    """Not every file announces its length, and others fill the disk meanwhile."""
    check_room(folder, len(piece))
    writer.write(piece)


# --- what Ollama is besides ---

OLLAMA_API_LEVEL = "0.33.0"


class OllamaVersion(msgspec.Struct, frozen=True, kw_only=True):
    """`version` is the level of Ollama's API that clients may count on; `localrun` the daemon's own version."""

    version: str
    localrun: str


class CloudStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether models run elsewhere: never."""

    disabled: bool
    source: str


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What of Ollama's own services there is: nothing."""

    cloud: CloudStatus


async def version(_: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json(OllamaVersion(version=OLLAMA_API_LEVEL, localrun=__version__))


async def status(_: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json(ServiceStatus(cloud=CloudStatus(disabled=True, source="config")))


async def me(_: Runtime, exchange: Exchange) -> None:
    await exchange.read_body()
    raise Unauthorized("nobody is signed in; localrun has no accounts and needs none")


async def sign_out(_: Runtime, exchange: Exchange) -> None:
    await exchange.read_body()
    await exchange.answer(b"")


async def experimental(_: Runtime, exchange: Exchange) -> None:
    await exchange.read_body()
    raise NotSupported(f"{exchange.path} is a service of ollama.com, which localrun does not use")
