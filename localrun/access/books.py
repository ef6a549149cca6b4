"""Who keeps the books of API keys: which there are, what they may still use, what they have used. And who changed what.

A daemon keeps its own (`OwnBooks`). The doors of a cluster have one set of books, the head's, which is an ordinary
daemon's: a door keeps a copy of the keys, parts of quotas (`quotas.Leased`), and its own use until the head has it.

Owner: one per daemon, on its event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from localrun.access.keys import Key, KeyFile
from localrun.access.quotas import Leased, Quota
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


# --- who changed what, and who was turned away: `audit.jsonl` in the state folder, one JSON object a line ---
#
#     {"time": "2026-11-23T08:00:00+00:00", "who": "zed", "what": "DELETE /api/delete", "from": "192.168.1.7",
#      "result": "200"}
#
# Written by the daemon (acts that change something, failed attempts to get in) and by the command line (keys that are
# made and revoked), without what was asked or answered. A file that is larger than `MAX_BYTES` becomes `audit.jsonl.1`,
# and so on; `N_OLD` of them are kept.

FILE_NAME = "audit.jsonl"
MAX_BYTES = 1024 * 1024
N_OLD = 4

_log = logging.getLogger(__name__)


class AuditLog:
    """See above. Mode 0600. Never raises: what cannot be written is in the daemon's log."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def write(self, *, who: str, what: str, address: str, result: str) -> None:
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "who": who, "what": what, "from": address, "result": result,
        }  # fmt: skip
        line = json.dumps(entry).encode("ascii") + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
            try:
                # One write each, so that lines of several processes never mix.
                os.write(descriptor, line)
                is_full = os.fstat(descriptor).st_size >= MAX_BYTES
            finally:
                os.close(descriptor)
            if is_full:
                self._rotate()
        except OSError as error:
            _log.warning("%s cannot be written (%s): %s", self.path, error.strerror, line.decode("ascii").strip())

    def _rotate(self) -> None:
        for number in range(N_OLD - 1, 0, -1):
            older = self.path.with_name(f"{FILE_NAME}.{number}")
            if older.exists():
                os.replace(older, self.path.with_name(f"{FILE_NAME}.{number + 1}"))
        os.replace(self.path, self.path.with_name(f"{FILE_NAME}.1"))
