"""The Hugging Face hub as a source: plans, downloads into the shared cache, and the search for GGUF repositories.

Runs in the daemon. huggingface_hub answers for metadata, the token, the address and the place of the cache (in threads,
since it is synchronous); the content is fetched by `download.fetch`, because huggingface_hub starts a broken transfer
anew. Files that the hub keeps in its chunk store (xet) come over their plain address, which the hub serves as well. It
is imported when it is needed, since most of the daemon's life is spent without it.

Invariant: nothing but a question waits for the hub. The threads are the hub's own, a few at a time, and the daemon ends
without them; a question whose asker has left ends before its next attempt.

Does not: choose files (`choose` does), validate GGUF headers, write manifests, or delete from the cache.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import random
import re
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx2

from localrun import __version__
from localrun.errors import BadRequest, DownloadFailed, LocalrunError, NotFound, SourceRefused, Unavailable
from localrun.models.download import ranges
from localrun.models.download.fetch import fetch
from localrun.models.download.partial import failed
from localrun.models.download.plan import FetchLimits, Item, NoProgress, PlannedFile, Progress, RemotePlan
from localrun.models.download.ranges import PASSING_STATUSES, backoff_s, why_not
from localrun.models.name import OLLAMA_HOST
from localrun.models.quant_choice import QuantChoice, RemoteFile
from localrun.models.storage.hub_cache import RepoCache, checked_commit, checked_path
from localrun.models.storage.hub_cache import folder as shared_cache_folder
from localrun.models.storage.manifest import Place, Role, Source, StoredFile

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo
    from huggingface_hub.hf_api import RepoFile

# --- what the hub's refusals mean ---
# It answers 401 to those without a token whether a repository is private, gated or not there at all; so a message has
# to name all that it can be, and the way out of each.

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token from {endpoint}/settings/tokens"


def translated(error: Exception, repo: str, revision: str, endpoint: str, *, has_token: bool) -> LocalrunError:
    """The error of ours for one of huggingface_hub's. Errors of ours, and bugs, come back as they are."""
    from huggingface_hub import errors

    host = urlsplit(endpoint).netloc or f"HF_ENDPOINT '{endpoint}'"
    if isinstance(error, LocalrunError):
        return error
    if isinstance(error, errors.GatedRepoError):
        return gated(repo, endpoint, _status(error), has_token=has_token)
    if isinstance(error, errors.RepositoryNotFoundError):
        way_out = "" if has_token else f"; if it is private, {_LOG_IN.format(endpoint=endpoint)}"
        token = " (or your token may not see it)" if has_token else ""
        owner, _, model = repo.partition("/")
        ollama = f"; if it is one of Ollama's models, ask for {model if owner == 'ollama' else f'{OLLAMA_HOST}/{repo}'}"
        return NotFound(f"there is no repository '{repo}' at {host}{token}{way_out}{ollama}", field="model")
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFound(f"'{repo}' has no branch, tag or commit '{revision}'", field="model")
    if isinstance(error, errors.HFValidationError):
        return BadRequest(f"'{repo}' is no name of a repository on the hub", field="model")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return Unavailable("HF_HUB_OFFLINE is set, so the hub cannot be asked; unset it to pull")
    if isinstance(error, errors.HfHubHTTPError):
        return _by_status(_status(error), repo, endpoint, has_token=has_token)
    if isinstance(error, httpx2.TransportError):
        return DownloadFailed(
            f"{host} cannot be reached ({why_not(error)}); check the connection, or set HF_ENDPOINT to a mirror"
        )
    if isinstance(error, UnicodeEncodeError) and has_token:
        return BadRequest(f"your token has a character that no token has; copy it anew from {endpoint}/settings/tokens")
    if isinstance(error, json.JSONDecodeError | KeyError | TypeError | ValueError):
        return DownloadFailed(f"{host} answered with something that no hub should ({type(error).__name__}: {error})")
    return DownloadFailed(f"{host}: {error}")


def is_passing(error: Exception) -> bool:
    """Whether asking again may help: no connection, or a hub in trouble. Too many requests are not helped by more."""
    return isinstance(error, httpx2.TransportError) or _status(error) in PASSING_STATUSES - {429}


def refused(error: SourceRefused, repo: str, endpoint: str, *, has_token: bool) -> LocalrunError:
    """The refusal of a file's content, with the way out where the status tells it."""
    if error.source_status in (401, 403) and "restricted" in error.message.lower():
        return gated(repo, endpoint, error.source_status, has_token=has_token)
    if error.source_status in (401, 403, 429):
        return _by_status(error.source_status, repo, endpoint, has_token=has_token)
    return error


def gated(repo: str, endpoint: str, status: int, *, has_token: bool) -> SourceRefused:
    """The owner of a repository wants terms to be accepted first."""
    page = f"{endpoint}/{repo}"
    if has_token:
        way_out = f"your token has no access yet: ask for it at {page}, and pull again once it is granted"
    else:
        way_out = f"accept its terms at {page}, then {_LOG_IN.format(endpoint=endpoint)}"
    return SourceRefused(f"'{repo}' is gated; {way_out}", source_status=status)


def _by_status(status: int, repo: str, endpoint: str, *, has_token: bool) -> LocalrunError:
    host = urlsplit(endpoint).netloc
    if status in (401, 403) and has_token:
        return SourceRefused(
            f"{host} refused your token for '{repo}'; check it with `hf auth whoami`, and that it may read gated and "
            f"private repositories",
            source_status=status,
        )
    if status in (401, 403):
        return SourceRefused(
            f"{host} wants to know who asks for '{repo}': {_LOG_IN.format(endpoint=endpoint)}", source_status=status
        )
    if status == 429:
        way_out = "wait some minutes" if has_token else f"wait some minutes, or {_LOG_IN.format(endpoint=endpoint)}"
        return SourceRefused(f"{host} has had too many requests from here; {way_out}", source_status=status)
    if status >= 500:
        return DownloadFailed(f"{host} answered {status}; it is in trouble itself, try again later")
    return SourceRefused(f"{host} answered {status} for '{repo}'", source_status=status)


def _status(error: Exception) -> int:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    return status if isinstance(status, int) else 0


# --- questions ---

_T = TypeVar("_T")

_MAX_QUESTIONS = 3
QUESTION_BASE_S = 1.0
# huggingface_hub waits for an answer for ever, except where it is told otherwise.
ANSWER_TIMEOUT_S = 20.0
MAX_AT_ONCE = 4
# In a question's thread: whether its asker has left.
_has_left: ContextVar[Callable[[], bool]] = ContextVar("has_left", default=lambda: False)


class _AskerLeftError(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, kw_only=True)
class Hub:
    """How to reach the hub."""

    endpoint: str
    token: str | None = field(repr=False)
    cache_folder: Path
    is_offline: bool = False
    _free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_AT_ONCE), repr=False, compare=False)

    @classmethod
    def from_environment(cls) -> Hub:
        """As huggingface_hub understands HF_ENDPOINT, HF_TOKEN or `hf auth login`, HF_HUB_CACHE or HF_HOME, and
        HF_HUB_OFFLINE. The first and the last are read when it is first imported."""
        from huggingface_hub import constants, get_token

        return cls(
            endpoint=constants.ENDPOINT,
            token=get_token(),
            cache_folder=shared_cache_folder(),
            is_offline=constants.HF_HUB_OFFLINE,
        )

    def cache(self, repo: str) -> RepoCache:
        return RepoCache(self.cache_folder, repo)

    def _api(self) -> HfApi:
        from huggingface_hub import HfApi

        ranges.prepare_proxies()
        _take_our_client()
        # False, because None would mean the stored token.
        token = self.token or False
        return HfApi(endpoint=self.endpoint, token=token, library_name="localrun", library_version=__version__)

    async def asked(self, question: Callable[[HfApi], _T], *, repo: str = "", revision: str = "") -> _T:
        """The hub's answer. Asked again a few times when the hub, or the way to it, is in passing trouble.

        The question runs in a thread. Raises NotFound, SourceRefused, DownloadFailed, Unavailable and BadRequest.
        """
        n_failures = 0
        while True:
            try:
                return await self._in_a_thread(lambda: question(self._api()))
            except LocalrunError:
                raise
            except Exception as error:
                n_failures += 1
                if n_failures >= _MAX_QUESTIONS or not is_passing(error):
                    has_token = self.token is not None
                    raise translated(error, repo, revision, self.endpoint, has_token=has_token) from error
            wait_s = backoff_s(n_failures, base_s=QUESTION_BASE_S, cap_s=QUESTION_BASE_S * 4, draw=random.random())
            await asyncio.sleep(wait_s)

    async def _in_a_thread(self, work: Callable[[], _T]) -> _T:
        """What `work` gives. A thread is free again when its work has ended, which may be after the caller has left."""
        loop = asyncio.get_running_loop()
        has_left = threading.Event()
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()
        answer.set_running_or_notify_cancel()

        def run() -> None:
            _has_left.set(has_left.is_set)
            try:
                done = partial(answer.set_result, work())
            except BaseException as error:
                done = partial(answer.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the daemon has ended
                loop.call_soon_threadsafe(self._free.release)
            done()

        await self._free.acquire()
        # Not of a pool: the end of a program waits for those.
        threading.Thread(target=run, name="hub", daemon=True).start()
        try:
            return await asyncio.wrap_future(answer)
        finally:
            has_left.set()


@cache
def _take_our_client() -> None:
    """From now on huggingface_hub asks with a client that does not wait for ever, and leaves asking again to `asked`:
    its own attempts would take half a minute of each of ours."""
    from huggingface_hub import set_client_factory

    set_client_factory(_Client)


class _NoAnswerError(httpx2.TransportError):
    """The way to the hub is broken; of a kind after which huggingface_hub does not try again."""


class _Client(httpx2.Client):
    def __init__(self) -> None:
        super().__init__(
            follow_redirects=True, event_hooks={"request": [_before_attempt], "response": [_after_attempt]}
        )

    def send(self, request: httpx2.Request, **how: Any) -> httpx2.Response:
        try:
            return super().send(request, **how)
        except httpx2.TransportError as error:
            raise _NoAnswerError(why_not(error)) from error


def _before_attempt(request: httpx2.Request) -> None:
    if _has_left.get()():
        raise _AskerLeftError
    request.extensions["timeout"] = httpx2.Timeout(ANSWER_TIMEOUT_S).as_dict()


def _after_attempt(response: httpx2.Response) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    if response.status_code in PASSING_STATUSES:
        raise HfHubHTTPError(f"status {response.status_code}", response=response)


@dataclass(frozen=True, kw_only=True)
class HubHit:
    """A repository that `search` found."""

    repo: str
    n_downloads: int
    n_likes: int
    updated_at: datetime | None
    is_gated: bool
    licence: str
    tags: tuple[str, ...]


async def search(query: str, *, hub: Hub, limit: int = 20) -> list[HubHit]:
    """GGUF repositories that match, the most downloaded first. Raises as `Hub.asked` does; Unavailable when offline."""
    if hub.is_offline:
        raise Unavailable("HF_HUB_OFFLINE is set, so the hub cannot be searched; unset it")

    def found(api: HfApi) -> list[ModelInfo]:
        models = api.list_models(
            search=query, filter="gguf", sort="downloads", limit=limit,
            expand=["downloads", "likes", "gated", "lastModified", "tags"],
        )  # fmt: skip
        return list(itertools.islice(models, limit))

    return [
        HubHit(
            repo=info.id,
            n_downloads=info.downloads or 0,
            n_likes=info.likes or 0,
            updated_at=info.last_modified,
            is_gated=bool(info.gated),
            licence=licence_of(info),
            tags=tuple(info.tags or ()),
        )
        for info in await hub.asked(found)
    ]


def licence_of(info: ModelInfo) -> str:
    """The short name that the repository's card gives, which the hub also lists among the tags."""
    tags = [tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")]
    return tags[0] if tags else ""


# --- plans and downloads ---

DEFAULT_REVISION = "main"

# Picks among the GGUF files of a repository: `quant_choice.choose` with everything but the files filled in.
Choose = Callable[[Sequence[RemoteFile]], QuantChoice]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_SUFFIX = ".gguf"
_MAX_FILES = 20_000
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

    info = api.model_info(name.repo, revision=name.revision)
    commit = checked_commit(info.sha or "")
    if info.gated:
        api.auth_check(name.repo)
    tree = api.list_repo_tree(name.repo, revision=commit, recursive=True)
    entries = [entry for entry in itertools.islice(tree, _MAX_FILES) if isinstance(entry, RepoFile)]
    return _Facts(info, commit, {file.path: file for file in entries if _SUFFIX in file.path.lower()})


def _plan_of_hub(name: HubName, facts: _Facts, hub: Hub, choose: Choose) -> RemotePlan:
    info, commit, files = facts
    choice = choose([RemoteFile(path, file.size) for path, file in files.items()])
    cache = hub.cache(name.repo)
    plan = _plan_of(name, commit, choice, hub, lambda path, role: _planned(files[path], cache, commit, hub, role))
    return dataclasses.replace(plan, licence=licence_of(info))


def _plan_of(
    name: HubName, commit: str, choice: QuantChoice, hub: Hub, planned: Callable[[str, Role], PlannedFile]
) -> RemotePlan:
    files = [planned(file.path, Role.MODEL) for file in choice.files]
    if choice.projector is not None:
        files.append(planned(choice.projector.path, Role.PROJECTOR))
    path = choice.files[0].path
    url = f"{hub.endpoint}/{name.repo}/blob/{commit}/{path}"
    return RemotePlan(
        repo=name.repo,
        revision=commit,
        files=tuple(files),
        # The revision as it was asked for is what a later pull has to ask for again; the commit is in the URL.
        source=Source(kind="hub", repo=name.repo, revision=name.revision, file=path, url=url),
        quant=choice.quant,
        reason=choice.reason,
        left_projector=choice.left_projector,
    )


def _planned(file: RepoFile, cache: RepoCache, commit: str, hub: Hub, role: Role) -> PlannedFile:
    from huggingface_hub import hf_hub_url

    checked_path(file.path)  # of others no path is made
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

    def planned(path: str, role: Role) -> PlannedFile:
        file = files[path]
        sha256 = file.etag if _SHA256.fullmatch(file.etag) else ""
        # Never fetched: `download` finds it in the snapshot.
        item = Item(url="", target=cache.snapshot(commit, path), name=path, size_bytes=file.size_bytes)
        return PlannedFile(item, _stored(role, path, file.size_bytes, sha256, cache, commit))

    return _plan_of(name, commit, choice, hub, planned)


def _stored(role: Role, path: str, size_bytes: int, sha256: str, cache: RepoCache, commit: str) -> StoredFile:
    return StoredFile(
        role=role,
        place=Place.HUB,
        size_bytes=size_bytes,
        digest=f"sha256:{sha256}" if sha256 else "",
        path=cache.relative(commit, path),
    )


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
