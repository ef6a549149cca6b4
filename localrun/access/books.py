"""Who keeps the books of API keys: which there are, what they may still use, what they have used.

A daemon keeps its own (`OwnBooks`). The doors of a cluster have one set of books, the head's, which is an ordinary
daemon's: a door keeps a copy of the keys, parts of quotas (`leases.py`), and its own use until the head has it.

Owner: one per daemon, on its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from localrun.access.keys import Key, KeyFile
from localrun.access.leases import Leased
from localrun.access.quotas import Quota
from localrun.access.usage import Total, UsageFile


class Books(Protocol):
    """See the module. While they are not `is_fresh`, nobody knows which keys hold."""

    keys: KeyFile
    usage: UsageFile

    @property
    def is_fresh(self) -> bool: ...
    def quota(self, key: Key, now_s: float) -> Quota | Leased: ...
    def follow(self, keys: Mapping[str, Key], now_s: float) -> None:
        """The keys that there are now, by their IDs."""

    async def totals(self, by: str, since_day: str, key: str | None) -> list[Total]:
        """See `UsageFile.totals`. Raises sqlite3.Error, and Unavailable."""


class OwnBooks:
    """Those in a folder of this machine."""

    is_fresh = True

    def __init__(self, folder: Path) -> None:
        self.keys = KeyFile(folder)
        self.usage = UsageFile(folder)
        self._quotas: dict[str, Quota] = {}

    def quota(self, key: Key, now_s: float) -> Quota:
        quota = self._quotas.get(key.id)
        if quota is None:
            quota = self._quotas[key.id] = Quota(key, now_s, self.usage.levels(key.id))
        return quota

    def follow(self, keys: Mapping[str, Key], now_s: float) -> None:
        for key_id, quota in list(self._quotas.items()):
            if key_id in keys:
                quota.follow(keys[key_id], now_s)
            elif not quota.n_running:
                del self._quotas[key_id]

    async def totals(self, by: str, since_day: str, key: str | None) -> list[Total]:
        return await asyncio.to_thread(self.usage.totals, by, since_day=since_day, key=key)
