"""The Hugging Face hub as a source: plans, downloads into the shared cache, and the search for GGUF repositories.

Runs in the daemon. huggingface_hub answers for metadata, the token, the address and the place of the cache (in threads,
since it is synchronous); the content is fetched by `download.fetch`, because huggingface_hub starts a broken transfer
anew. Files that the hub keeps in its chunk store (xet) come over their plain address, which the hub serves as well.

Does not: choose files (`choose` does), validate GGUF headers, write manifests, or delete from the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx2

from localrun.errors import DownloadFailed, SourceRefused, Unavailable
from localrun.models.download.fetch import fetch
from localrun.models.download.partial import failed
from localrun.models.download.plan import FetchLimits, Item, NoProgress, PlannedFile, Progress, RemotePlan
from localrun.models.quant_choice import QuantChoice, RemoteFile
from localrun.models.sources.hub import Hub, HubHit, licence_of, refused, search
from localrun.models.storage.hub_cache import CachedFile, RepoCache, checked_commit, checked_path
from localrun.models.storage.manifest import Place, Role, Source, StoredFile

__all__ = ["Choose", "Hub", "HubHit", "HubName", "download", "plan", "search"]

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo
    from huggingface_hub.hf_api import RepoFile

DEFAULT_REVISION = "main"

# Picks among the GGUF files of a repository: `quant_choice.choose` with everything but the files filled in.
Choose = Callable[[Sequence[RemoteFile]], QuantChoice]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_SUFFIX = ".gguf"
_MAX_FILES = 20_000
_API_TIMEOUT_S = 20.0
_NO_PROGRESS = NoProgress()
_USUAL_LIMITS = FetchLimits()


@dataclass(frozen=True)
class HubName:
    """`repo` is `owner/name`; `revision` a branch, a tag or a commit. Quantization and file name are for `choose`."""

    repo: str
    revision: str = DEFAULT_REVISION


async def plan(name: HubName, *, hub: Hub, choose: Choose) -> RemotePlan:
    """The files of a repository that make the model. Nothing is written. Offline: of what the cache holds.

    Raises NotFound (no such repository or revision), SourceRefused (gated, a refused token, too many requests; the
    message says what to do), DownloadFailed (no connection, or an answer that no hub should give), Unavailable (offline
    and not in the cache), and what `choose` raises.
    """
    hub.cache(name.repo).folder  # noqa: B018  (checks the name before anything is asked)
    if hub.is_offline:
        return await asyncio.to_thread(_plan_of_cache, name, hub, choose)
    facts = await hub.asked(lambda api: _facts(name, api), repo=name.repo, revision=name.revision)
    return await asyncio.to_thread(_plan_of_hub, name, facts, hub, choose)


async def download(
    plan: RemotePlan,
    *,
    hub: Hub,
    client: httpx2.AsyncClient,
    limits: FetchLimits = _USUAL_LIMITS,
    progress: Progress = _NO_PROGRESS,
) -> tuple[Path, ...]:
    """Fetches what the cache does not have and links the snapshot; one path per file of the plan, in its order.

    The revision's ref is written last. Raises what `fetch` raises; for refusals the message says what to do about them.
    """
    wanted = []
    for file in plan.files:
        if _is_complete(hub.cache_folder / file.stored.path, file.item):
            progress.advanced(file.item, file.stored.size_bytes)
        else:
            wanted.append(file.item)
    if wanted and hub.is_offline:
        raise Unavailable(f"HF_HUB_OFFLINE is set and {wanted[0].name} is not in the cache at {hub.cache_folder}")
    try:
        await fetch(wanted, client=client, limits=limits, progress=progress)
    except SourceRefused as error:
        raise refused(error, plan.repo, hub.endpoint, has_token=hub.token is not None) from error
    try:
        return await asyncio.to_thread(_link, plan, hub)
    except OSError as error:
        raise failed(plan.files[0].item.target, error) from error


class _Facts(NamedTuple):
    """What the hub says about a repository at one commit. `files` are its GGUFs by path."""

    info: ModelInfo
    commit: str
    files: dict[str, RepoFile]


def _facts(name: HubName, api: HfApi) -> _Facts:
    from huggingface_hub.hf_api import RepoFile

    info = api.model_info(name.repo, revision=name.revision, timeout=_API_TIMEOUT_S)
    commit = checked_commit(info.sha or "")
    if info.gated:
        api.auth_check(name.repo)
    tree = api.list_repo_tree(name.repo, revision=commit, recursive=True)
    entries = [entry for entry in itertools.islice(tree, _MAX_FILES) if isinstance(entry, RepoFile)]
    return _Facts(info, commit, {file.path: file for file in entries if _SUFFIX in file.path.lower()})


def _plan_of_hub(name: HubName, facts: _Facts, hub: Hub, choose: Choose) -> RemotePlan:
    info, commit, files = facts
    for path in files:
        checked_path(path)
    choice = choose([RemoteFile(path, file.size) for path, file in files.items()])
    cache = hub.cache(name.repo)
    return RemotePlan(
        repo=name.repo,
        revision=commit,
        files=tuple(_planned(files[file.path], cache, commit, hub, role) for file, role in _chosen(choice)),
        source=_source(name, commit, choice, hub),
        quant=choice.quant,
        reason=choice.reason,
        licence=licence_of(info),
        is_gated=bool(info.gated),
        left_projector=choice.left_projector,
    )


def _chosen(choice: QuantChoice) -> list[tuple[RemoteFile, Role]]:
    files = [(file, Role.MODEL) for file in choice.files]
    return files if choice.projector is None else [*files, (choice.projector, Role.PROJECTOR)]


def _planned(file: RepoFile, cache: RepoCache, commit: str, hub: Hub, role: Role) -> PlannedFile:
    from huggingface_hub import hf_hub_url

    sha256 = file.lfs.sha256 if file.lfs else ""
    git_sha1 = "" if file.lfs else file.blob_id
    etag = sha256 or git_sha1
    if file.size < 0 or not (_SHA256 if file.lfs else _GIT_SHA1).fullmatch(etag):
        raise DownloadFailed(f"the hub names no digest and size for {file.path}; nothing of it was written")
    item = Item(
        url=hf_hub_url(cache.repo, file.path, revision=commit, endpoint=hub.endpoint),
        target=cache.blob(etag),
        name=file.path,
        headers={"Authorization": f"Bearer {hub.token}"} if hub.token else {},
        size_bytes=file.size,
        sha256=sha256 or None,
        git_sha1=git_sha1 or None,
        lock_path=cache.lock(etag),
    )
    return PlannedFile(item, _stored(role, file.path, file.size, sha256, cache, commit))


def _plan_of_cache(name: HubName, hub: Hub, choose: Choose) -> RemotePlan:
    cache = hub.cache(name.repo)
    commit = cache.commit_of(name.revision)
    files = {file.path: file for file in cache.files(commit) if file.path.lower().endswith(_SUFFIX)} if commit else {}
    if commit is None or not files:
        raise Unavailable(
            f"HF_HUB_OFFLINE is set and no GGUF of '{name.repo}' at '{name.revision}' is in the cache at "
            f"{hub.cache_folder}; unset it to pull"
        )
    choice = choose([RemoteFile(file.path, file.size_bytes) for file in files.values()])
    return RemotePlan(
        repo=name.repo,
        revision=commit,
        files=tuple(_planned_of_cache(files[file.path], cache, commit, role) for file, role in _chosen(choice)),
        source=_source(name, commit, choice, hub),
        quant=choice.quant,
        reason=choice.reason,
        left_projector=choice.left_projector,
    )


def _planned_of_cache(file: CachedFile, cache: RepoCache, commit: str, role: Role) -> PlannedFile:
    sha256 = file.etag if _SHA256.fullmatch(file.etag) else ""
    # Never fetched: `download` finds it in the snapshot.
    item = Item(url="", target=cache.snapshot(commit, file.path), name=file.path, size_bytes=file.size_bytes)
    return PlannedFile(item, _stored(role, file.path, file.size_bytes, sha256, cache, commit))


def _stored(role: Role, path: str, size_bytes: int, sha256: str, cache: RepoCache, commit: str) -> StoredFile:
    return StoredFile(
        role=role,
        place=Place.HUB,
        size_bytes=size_bytes,
        digest=f"sha256:{sha256}" if sha256 else "",
        path=cache.relative(commit, path),
    )


def _source(name: HubName, commit: str, choice: QuantChoice, hub: Hub) -> Source:
    path = choice.files[0].path
    url = f"{hub.endpoint}/{name.repo}/blob/{commit}/{path}"
    # The revision as it was asked for is what a later pull has to ask for again; the commit is in the URL.
    return Source(kind="hub", repo=name.repo, revision=name.revision, file=path, url=url)


def _link(plan: RemotePlan, hub: Hub) -> tuple[Path, ...]:
    cache = hub.cache(plan.repo)
    paths = []
    is_new = False
    for file in plan.files:
        path = hub.cache_folder / file.stored.path
        if not _is_complete(path, file.item):
            is_new = True
            path = cache.link(plan.revision, file.item.name, file.item.target.name)
        paths.append(path)
    if not hub.is_offline:
        # A cache that has everything may be one that nobody may write to.
        with contextlib.nullcontext() if is_new else contextlib.suppress(OSError):
            cache.tag()
            cache.remember(plan.source.revision, plan.revision)
    return tuple(paths)


def _is_complete(path: Path, item: Item) -> bool:
    """Whether the snapshot has the file already. What the cache names is whole: nobody renames a half file into it."""
    try:
        return path.stat().st_size == item.size_bytes
    except OSError:
        return False
