"""How to reach the Hugging Face hub, asking it what huggingface_hub has calls for, and what its refusals mean.

Owned by the daemon. huggingface_hub is synchronous, so questions run in threads; it is imported when it is needed,
since most of the daemon's life is spent without it. The hub answers 401 to those without a token whether a repository
is private, gated or not there at all; so a message has to name all that it can be, and the way out of each.

Invariant: nothing but a question waits for the hub. The threads are the hub's own, a few at a time, and the daemon ends
without them; a question whose asker has left ends before its next attempt.

Does not: fetch content (`download.fetch` does).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import random
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import httpx2

from localrun import __version__
from localrun.errors import BadRequest, DownloadFailed, LocalrunError, NotFound, SourceRefused, Unavailable
from localrun.models.download import ranges
from localrun.models.download.ranges import PASSING_STATUSES, backoff_s, why_not
from localrun.models.name import OLLAMA_HOST
from localrun.models.storage.hub_cache import RepoCache
from localrun.models.storage.hub_cache import folder as shared_cache_folder

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token from {endpoint}/settings/tokens"


def translated(error: Exception, repo: str, revision: str, endpoint: str, *, has_token: bool) -> LocalrunError:
    """The error of ours for one of huggingface_hub's. Errors of ours, and bugs, come back as they are."""
    from huggingface_hub import errors

    host = urlsplit(endpoint).netloc
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
    return await hub.asked(lambda api: _search(query, api, limit))


def _search(query: str, api: HfApi, limit: int) -> list[HubHit]:
    found = api.list_models(
        search=query,
        filter="gguf",
        sort="downloads",
        limit=limit,
        expand=["downloads", "likes", "gated", "lastModified", "tags"],
    )
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
        for info in itertools.islice(found, limit)
    ]


def licence_of(info: ModelInfo) -> str:
    """The short name that the repository's card gives, which the hub also lists among the tags."""
    tags = [tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:")]
    return tags[0] if tags else ""
