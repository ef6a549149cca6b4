"""Brings a model or an adapter here: from a name to a manifest that points to complete, verified, sound files.

Runs in the daemon's event loop; the disk is touched in threads. The order is what makes it safe at every point: the
plan is checked before a path is made of it, a model that no engine here can load is refused before it is transferred,
files get their final names once their digests are right, headers are read by our own bounded code before llama.cpp may
see them, and the name is written last. What a cancelled or killed pull transferred is found again by the next one.

A projector comes with its model. One that cannot be used here is left out, and the pull says why: the model answers to
text all the same. It is an error where that projector was asked for.

Does not: keep two pulls of one name apart (server/pulls.py does), or choose among quantizations (quant_choice.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import httpx2
import msgspec

from localrun.errors import BadModelFile, BadRequest
from localrun.models import catalog, naming, quant_choice
from localrun.models.download import huggingface, ollama
from localrun.models.download.fetch import fetch, first_bytes
from localrun.models.download.huggingface import Hub, HubName
from localrun.models.download.ollama import RegistryName
from localrun.models.download.plan import FetchLimits, Progress, RemotePlan
from localrun.models.gguf import projectors, tables
from localrun.models.gguf.adapter_header import check_finite, facts_of, misfit
from localrun.models.gguf.header import ADAPTERS, FileKind, Header, Value, kind_of
from localrun.models.gguf.reader import first_entries, read_header, read_named
from localrun.models.name import DEFAULT_TAG, OLLAMA_HOST, Kind, ModelName
from localrun.models.quant_choice import QuantChoice, RemoteFile
from localrun.models.storage import manifest, other_programs
from localrun.models.storage.manifest import Manifest, Place, Role, StoredFile
from localrun.models.storage.store import Store

# Enough for what a header says before its vocabulary.
FIRST_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class PullContext:
    """What a pull works with. `memory_bytes` is this machine's, for the choice among quantizations."""

    store: Store
    hub: Hub
    client: httpx2.AsyncClient
    limits: FetchLimits
    memory_bytes: int


class Observer(Progress, Protocol):
    """Told how far a pull is, in the event loop; must be quick. Statuses are those that Ollama's clients know."""

    def status(self, text: str) -> None:
        """A new phase, or something that a person should know."""

    def planned(self, plan: RemotePlan) -> None:
        """What will be fetched; said once, before the first `advanced`."""


async def pull(
    name: str, *, context: PullContext, observer: Observer, is_insecure: bool = False, projector: str = ""
) -> Manifest:
    """The manifest that `name` points to from now on. Files that are here already are not transferred again.

    `is_insecure` allows plain http to an Ollama registry that is not on this machine. `projector` is the name or the
    type of the projector to fetch, or "none"; "" leaves the choice to quant_choice.py.

    Raises BadRequest for a name that cannot be pulled, NotFound, DownloadFailed and its kinds, Unavailable (offline),
    and BadModelFile when what came is no model that can run: then the name means what it meant before.
    """
    check_name(name)
    parsed = await asyncio.to_thread(context.store.meant, name)
    name = parsed.text
    await asyncio.to_thread(naming.check_free, context.store, name)
    observer.status("pulling manifest")
    plan = await _plan(parsed, context, is_insecure, projector)
    if plan.reason:
        observer.status(plan.reason)
    left_out = ""
    if plan.left_projector:
        left_out = f"{plan.left_projector} was left out as asked; `localrun pull {name}` gets it"
    if problem := await _problem_of_projector(plan, context):
        plan, left_out = _without_projector(plan, problem, observer, is_wanted=bool(projector))
    observer.planned(plan)
    await _check_loadable(plan, context)
    files = await asyncio.to_thread(_owned, context.store, plan)
    with context.store.held(files):
        paths = await _fetch(plan, context, observer)
        observer.status("verifying sha256 digest")
        header = await asyncio.to_thread(_check, plan, paths)
        unusable: list[StoredFile] = []
        if header.kind in ADAPTERS:
            files = tuple(msgspec.structs.replace(file, role=Role.ADAPTER) for file in files)
            observer.status(f"this is an adapter; ask for it with a model: MODEL+{manifest.canonical(name)}")
        elif problem := await asyncio.to_thread(_check_projector, plan, paths, header):
            plan, left_out = _without_projector(plan, problem, observer, is_wanted=bool(projector))
            unusable = [file for file in files if file.role is Role.PROJECTOR]
            files = tuple(file for file in files if file not in unusable)
        observer.status("writing manifest")
        said = Manifest(
            name=name,
            files=files,
            created_at=datetime.now(UTC),
            source=plan.source,
            parameters=plan.parameters,
            system=plan.system,
            messages=plan.messages,
            licence_text=plan.licence_text or plan.licence,
            no_projector=left_out,
        )
        await asyncio.to_thread(naming.point, context.store, name, said)
        if not said.is_adapter:
            for note in await asyncio.to_thread(lambda: context.store.model_of(said).notes):
                observer.status(note)
    await asyncio.to_thread(naming.release, context.store, unusable)
    observer.status("success")
    return said


def check_name(name: str) -> None:
    """Raises BadRequest for what no source can have: a path, the built-in model, or no name at all."""
    parsed = ModelName.parse(name)
    if parsed.kind is Kind.PATH:
        raise BadRequest(f"'{name[:200]}' is a path; files are used in place, and not pulled", field="model")
    if parsed.kind is Kind.BUILT_IN:
        raise BadRequest(f"'{name}' is the built-in model; it is always here", field="model")


async def _plan(name: ModelName, context: PullContext, is_insecure: bool, projector: str) -> RemotePlan:
    """By the name's form: the catalogue, a repository on the hub, a registry; Ollama's for other bare names."""
    found = None if name.says_ollama else catalog.find(name)
    if found is not None:
        return await _plan_of_repo(HubName(found.entry.repo), found.quant, context, projector)
    if name.is_hub:
        repo = HubName(name.repo, name.revision or huggingface.DEFAULT_REVISION)
        return await _plan_of_repo(repo, name.tag, context, projector)
    without_projector = projector.lower() == quant_choice.NO_PROJECTOR
    if projector and not without_projector:
        raise BadRequest.of(
            "projector", "a model of a registry has the one that it has; leave projector out, or say none"
        )
    if name.registry_host:
        registry = RegistryName(name.registry_host, name.repo, name.tag or DEFAULT_TAG, is_insecure)
    else:
        owned = f"{other_programs.DEFAULT_OWNER}/{name.name}"
        registry = RegistryName(OLLAMA_HOST, owned, name.tag or DEFAULT_TAG, is_insecure)
    return await ollama.plan(
        registry, models_folder=context.store.folder, client=context.client, without_projector=without_projector
    )


async def _plan_of_repo(repo: HubName, tag: str | None, context: PullContext, projector: str) -> RemotePlan:
    def choose(files: Sequence[RemoteFile]) -> QuantChoice:
        choice = quant_choice.choose(files, tag=tag, memory_bytes=context.memory_bytes, repo=repo.repo)
        model = choice.files[0].path
        wanted = quant_choice.projector_of_repository(model, files, wanted=projector)
        usual = wanted or quant_choice.projector_of_repository(model, files)
        return choice._replace(projector=wanted, left_projector="" if wanted or usual is None else usual.path)

    return await huggingface.plan(repo, hub=context.hub, choose=choose)


async def _problem_of_projector(plan: RemotePlan, context: PullContext) -> str:
    """Why no engine here can use the plan's projector, by its first bytes; "" where these say nothing."""
    name, metadata = await _beginning(plan, Role.PROJECTOR, context)
    problem = projectors.type_problem(metadata) if projectors.encoders(metadata) else ""
    return problem and f"{name} {problem}"


async def _beginning(plan: RemotePlan, role: Role, context: PullContext) -> tuple[str, Mapping[str, Value]]:
    """The name of the plan's first file of that role, and the entries that it begins with: none where it is here
    already, or cannot be had."""
    file = next((file for file in plan.files if file.stored.role is role), None)
    if file is None or not file.item.url or await asyncio.to_thread(context.store.path_of(file.stored).exists):
        return "", {}
    content = await first_bytes(file.item, FIRST_BYTES, client=context.client, limits=context.limits)
    return file.item.name, first_entries(content)


def _without_projector(
    plan: RemotePlan, problem: str, observer: Observer, *, is_wanted: bool
) -> tuple[RemotePlan, str]:
    """The plan without it, and the clause that says why. Raises BadModelFile for one that was asked for."""
    if is_wanted:
        raise BadModelFile(f"'{plan.repo}': {problem}; choose another projector, or none")
    observer.status(f"without its projector, so for text only: {problem}")
    files = tuple(file for file in plan.files if file.stored.role is not Role.PROJECTOR)
    return dataclasses.replace(plan, files=files), problem


async def _check_loadable(plan: RemotePlan, context: PullContext) -> None:
    """Raises BadModelFile for a model that no engine here can load, by its first bytes and before the rest comes.

    Where these cannot be had, or say nothing, the transfer decides.
    """
    _, entries = await _beginning(plan, Role.MODEL, context)
    if kind_of(entries) != FileKind.CONTROL_VECTOR and (problem := tables.problem(entries)):
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


async def _fetch(plan: RemotePlan, context: PullContext, observer: Observer) -> Sequence[Path]:
    if plan.source.kind == "hub":
        return await huggingface.download(
            plan, hub=context.hub, client=context.client, limits=context.limits, progress=observer
        )
    await fetch(plan.items, client=context.client, limits=context.limits, progress=observer)
    return [item.target for item in plan.items]


def _owned(store: Store, plan: RemotePlan) -> tuple[StoredFile, ...]:
    """The files of the plan; those in the hub's cache that another program brought there are marked as adopted.

    What is there without a name of ours is taken to be another program's, also if it is left of a pull that was killed:
    a file too many is a smaller harm than one that somebody misses.
    """
    with store.changing:
        ours = {file.path for file in manifest.read_all(store.folder).files if not file.adopted}
        return tuple(
            msgspec.structs.replace(file.stored, adopted=True)
            if file.stored.place is Place.HUB and file.stored.path not in ours and store.path_of(file.stored).exists()
            else file.stored
            for file in plan.files
        )


def _check(plan: RemotePlan, paths: Sequence[Path]) -> Header:
    """The header of the model, or of the adapter that is there alone. Raises BadModelFile when a file is not what its
    role says."""
    model: Header | None = None
    for file, path in zip(plan.files, paths, strict=True):
        role = file.stored.role
        if role is Role.MODEL and model is None:
            # A repository does not say which of the two it has.
            model = read_named(path) if len(plan.files) == 1 else read_header(path)
            if model.kind in ADAPTERS:
                facts_of(model)
                check_finite(model)
            elif problem := tables.problem(model.metadata):
                raise BadModelFile(f"'{plan.repo}' {problem}. {_way_out(plan)}")
        elif role is Role.ADAPTER:
            header = read_header(path, kind=FileKind.ADAPTER)
            if model is not None and (problem := misfit(header, model)):
                raise BadModelFile(f"the adapter of '{plan.repo}' {problem}")
            check_finite(header)
    if model is None:
        raise BadModelFile(f"'{plan.repo}' has no model file")
    return model


def _check_projector(plan: RemotePlan, paths: Sequence[Path], model: Header) -> str:
    """Why the projector that came cannot be used with the model, as a clause; "" if it can, or there is none."""
    for file, path in zip(plan.files, paths, strict=True):
        if file.stored.role is Role.PROJECTOR:
            try:
                problem = projectors.fit_problem(read_header(path, kind="projector"), model)
            except BadModelFile as error:
                return error.message
            return problem and f"{file.item.name} {problem}"
    return ""
