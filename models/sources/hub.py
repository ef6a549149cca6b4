"""How to reach the Hugging Face hub, and asking it what huggingface_hub has calls for.

Owned by the daemon. huggingface_hub is synchronous, so questions run in threads; it is imported when it is needed,
since most of the daemon's life is spent without it.

Invariant: nothing but a question waits for the hub. The threads are the hub's own, a few at a time, and the daemon ends
without them; a question whose asker has left ends before its next attempt.

Does not: fetch content (`download.fetch` does).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import random
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import httpx2

from localrun import __version__
from localrun.errors import LocalrunError
from localrun.models.download.retry import backoff_s
from localrun.models.hub_cache import folder as shared_cache_folder
from localrun.models.sources.hub_cache import RepoCache
from localrun.models.sources.hub_refusals import is_passing, translated

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_T = TypeVar("_T")

_MAX_QUESTIONS = 3
QUESTION_BASE_S = 1.0
# huggingface_hub waits for an answer for ever, except where it is told otherwise.
_ANSWER_TIMEOUT_S = 20.0
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
    """From now on huggingface_hub asks, and tries again, with a client that does not wait for ever."""
    from huggingface_hub import set_client_factory

    set_client_factory(_client)


def _client() -> httpx2.Client:
    return httpx2.Client(follow_redirects=True, event_hooks={"request": [_before_attempt]})


def _before_attempt(request: httpx2.Request) -> None:
    if _has_left.get()():
        raise _AskerLeftError
    request.extensions["timeout"] = httpx2.Timeout(_ANSWER_TIMEOUT_S).as_dict()
