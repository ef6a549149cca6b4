"""Brings a model here: from a name to a manifest that points to complete, verified, sound files.

Runs in the daemon's event loop; the disk is touched in threads. The order is what makes it safe at every point: the
plan is checked before a path is made of it, a model that no engine here can load is refused before it is transferred,
files get their final names once their digests are right, headers are read by our own bounded code before llama.cpp may
see them, and the name is written last. What a cancelled or killed pull transferred is found again by the next one.

Does not: keep two pulls of one name apart (server/pulls.py does), or choose among quantizations (quant_choice.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

import httpx2
import msgspec

from localrun.errors import BadModelFile, BadRequest
from localrun.models import catalog, naming, quant_choice
from localrun.models.download.fetch import fetch, first_bytes
from localrun.models.download.plan import FetchLimits, Item, RemotePlan
from localrun.models.gguf import architectures
from localrun.models.gguf.header import Header
from localrun.models.gguf.reader import first_entries, read_header
from localrun.models.name import DEFAULT_TAG, Kind, ModelName
from localrun.models.sources import huggingface, ollama
from localrun.models.sources.huggingface import Hub, HubName
from localrun.models.sources.ollama import RegistryName
from localrun.models.storage import manifest, ollama_manifest
from localrun.models.storage.manifest import Manifest, Place, Role, StoredFile
from localrun.models.storage.store import Store

# Enough for what a header says before its vocabulary.
FIRST_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Means:
    """What a pull works with. `memory_bytes` is this machine's, for the choice among quantizations."""

    store: Store
    hub: Hub
    client: httpx2.AsyncClient
    limits: FetchLimits
    memory_bytes: int


class Observer(Protocol):
    """Told how far a pull is, in the event loop; must be quick. Statuses are those that Ollama's clients know."""

    def status(self, text: str) -> None:
        """A new phase, or something that a person should know."""

    def planned(self, plan: RemotePlan) -> None:
        """What will be fetched; said once, before the first `advanced`."""

    def advanced(self, item: Item, n_bytes_done: int) -> None:
        """As `download.plan.Progress`."""

    def verifying(self, item: Item) -> None:
        """As `download.plan.Progress`."""


async def pull(name: str, *, means: Means, observer: Observer, is_insecure: bool = False) -> Manifest:
    """The manifest that `name` points to from now on. Files that are here already are not transferred again.

    `is_insecure` allows plain http to an Ollama registry that is not on this machine. Raises BadRequest for a name that
    cannot be pulled, NotFound, DownloadFailed and its kinds, Unavailable (offline), and BadModelFile when what came is
    no model that can run: then the name means what it meant before.
    """
    check_name(name)
    parsed = ModelName.parse(name)
    await asyncio.to_thread(naming.check_free, means.store, name)
    observer.status("pulling manifest")
    plan = await _plan(parsed, means, is_insecure)
    if plan.reason:
        observer.status(plan.reason)
    observer.planned(plan)
    await _check_loadable(plan, means)
    files = await asyncio.to_thread(_owned, means.store, plan)
    with means.store.held(files):
        paths = await _fetch(plan, means, observer)
        observer.status("verifying sha256 digest")
        header = await asyncio.to_thread(_check, plan, paths)
        if not header.chat_template and plan.source.kind == "registry":
            observer.status("the file brings no chat template, and Ollama's are not used: chats will be sent plainly")
        observer.status("writing manifest")
        said = _manifest(name, plan, files)
        await asyncio.to_thread(naming.point, means.store, name, said)
    observer.status("success")
    return said


def check_name(name: str) -> None:
    """Raises BadRequest for what no source can have: a path, the built-in model, or no name at all."""
    parsed = ModelName.parse(name)
    if parsed.kind is Kind.PATH:
        raise BadRequest(f"'{name[:200]}' is a path; files are used in place, and not pulled", field="model")
    if parsed.kind is Kind.BUILT_IN:
        raise BadRequest(f"'{name}' is the built-in model; it is always here", field="model")


async def _plan(name: ModelName, means: Means, is_insecure: bool) -> RemotePlan:
    """By the name's form: the catalogue, a repository on the hub, a registry; Ollama's for other bare names."""
    found = catalog.find(name)
    if found is not None:
        return await _plan_of_repo(HubName(found.entry.repo), found.quant, means)
    if name.is_hub:
        return await _plan_of_repo(HubName(name.repo, name.revision or huggingface.DEFAULT_REVISION), name.tag, means)
    if name.registry_host:
        registry = RegistryName(name.registry_host, name.repo, name.tag or DEFAULT_TAG, is_insecure)
    else:
        repo = f"{ollama_manifest.DEFAULT_OWNER}/{name.name}"
        registry = RegistryName(ollama_manifest.DEFAULT_HOST, repo, name.tag or DEFAULT_TAG, is_insecure)
    return await ollama.plan(registry, models_folder=means.store.folder, client=means.client)


async def _plan_of_repo(repo: HubName, tag: str | None, means: Means) -> RemotePlan:
    choose = partial(quant_choice.choose, tag=tag, memory_bytes=means.memory_bytes, repo=repo.repo)
    return await huggingface.plan(repo, hub=means.hub, choose=choose)


async def _check_loadable(plan: RemotePlan, means: Means) -> None:
    """Raises BadModelFile for a model that no engine here can load, by its first bytes and before the rest comes.

    Where these cannot be had, or say nothing, the transfer decides.
    """
    first = next((file for file in plan.files if file.stored.role is Role.MODEL), None)
    if first is None or not first.item.url or await asyncio.to_thread(means.store.path_of(first.stored).exists):
        return
    content = await first_bytes(first.item, FIRST_BYTES, client=means.client, limits=means.limits)
    if problem := architectures.problem(first_entries(content)):
        raise BadModelFile(f"'{plan.repo}' {problem}; nothing was transferred. {_way_out(plan)}")


def _way_out(plan: RemotePlan) -> str:
    """What to do about a model that cannot be loaded."""
    family = plan.repo.rpartition("/")[2].lower()
    known = [entry.name for entry in catalog.entries() if entry.family == family]
    if known:
        return f"The catalogue has it as llama.cpp wants it: localrun pull {known[0]}" + (
            f" (or {', '.join(known[1:])})" if known[1:] else ""
        )
    return f"Look for another GGUF of it (localrun search {family.removesuffix('-gguf')}), or update localrun"


async def _fetch(plan: RemotePlan, means: Means, observer: Observer) -> Sequence[Path]:
    if plan.source.kind == "hub":
        return await huggingface.download(
            plan, hub=means.hub, client=means.client, limits=means.limits, progress=observer
        )
    await fetch(plan.items, client=means.client, limits=means.limits, progress=observer)
    return [item.target for item in plan.items]


def _owned(store: Store, plan: RemotePlan) -> tuple[StoredFile, ...]:
    """The files of the plan; those in the hub's cache that another program brought there are marked as adopted.

    What is there without a name of ours is taken to be another program's, also if it is left of a pull that was killed:
    a file too many is a smaller harm than one that somebody misses.
    """
    with store.changing:
        manifests = manifest.read_all(store.folder).manifests.values()
        ours = {file.path for said in manifests for file in said.files if not file.adopted}
        return tuple(
            msgspec.structs.replace(file.stored, adopted=True)
            if file.stored.place is Place.HUB and file.stored.path not in ours and store.path_of(file.stored).exists()
            else file.stored
            for file in plan.files
        )


def _check(plan: RemotePlan, paths: Sequence[Path]) -> Header:
    """The model's header. Raises BadModelFile when a file is not what its role says."""
    model: Header | None = None
    for file, path in zip(plan.files, paths, strict=True):
        role = file.stored.role
        if role is Role.MODEL and model is None:
            model = read_header(path)
            if problem := architectures.problem(model.metadata):
                raise BadModelFile(f"'{plan.repo}' {problem}. {_way_out(plan)}")
        elif role is Role.ADAPTER:
            read_header(path, kind=role.value)
    if model is None:
        raise BadModelFile(f"'{plan.repo}' has no model file")
    return model


def _manifest(name: str, plan: RemotePlan, files: tuple[StoredFile, ...]) -> Manifest:
    return Manifest(
        name=name,
        files=files,
        created_at=datetime.now(UTC),
        source=plan.source,
        parameters=plan.parameters,
        system=plan.system,
        messages=plan.messages,
        licence_text=plan.licence_text or plan.licence,
    )
