"""How to reach the Hugging Face hub, and asking it what huggingface_hub has calls for.

Owned by the daemon. huggingface_hub is synchronous, so questions run in threads; it is imported when it is needed,
since most of the daemon's life is spent without it.

Does not: fetch content (`download.fetch` does).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from localrun import __version__
from localrun.errors import LocalrunError
from localrun.models.download.retry import backoff_s
from localrun.models.hub_cache import folder as shared_cache_folder

from .hub_cache import RepoCache
from .hub_refusals import is_passing, translated

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_T = TypeVar("_T")

_MAX_QUESTIONS = 3
QUESTION_BASE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Hub:
    """How to reach the hub."""

    endpoint: str
    token: str | None = field(repr=False)
    cache_folder: Path
    is_offline: bool = False

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
                return await asyncio.to_thread(lambda: question(self._api()))
            except LocalrunError:
                raise
            except Exception as error:
                n_failures += 1
                if n_failures >= _MAX_QUESTIONS or not is_passing(error):
                    has_token = self.token is not None
                    raise translated(error, repo, revision, self.endpoint, has_token=has_token) from error
            wait_s = backoff_s(n_failures, base_s=QUESTION_BASE_S, cap_s=QUESTION_BASE_S * 4, draw=random.random())
            await asyncio.sleep(wait_s)
