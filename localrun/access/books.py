"""The books of API keys: what each used, who keeps count of it, and who changed what.

`usage.db` in the data folder, SQLite: what the user and each key used, by day and model, and how full a key's buckets
were. The daemon writes, at two moments of a request, in one transaction each: when it is let in (the levels of its
key's buckets, with one request taken), and when each of its answers ends, before the client gets the end (the tokens,
and the levels without them). So whatever is killed, and when: a request that was let in is taken from its key's
requests once, and an answer whose end a client saw is counted once, with its tokens. The tokens of answers that were
running are not. Without keys nothing depends on it: it is counted when the client has the end. A transaction is written
to the log (WAL) without waiting for the disk: it outlives the process, and after a loss of power the last ones may be
missing.

What cannot be written (a full disk, another daemon that writes) is kept in memory and written with the next.

A door of a cluster tells the head its sums (`untold`), not what was added to them. Sums only grow, so one that comes
twice, late or out of order changes nothing. `elsewhere` has those of the doors; at a door, what the head has.

A daemon keeps its own books (`OwnBooks`). The doors of a cluster have one set of them, the head's, which is an ordinary
daemon's: a door keeps a copy of the keys, parts of quotas (`quotas.Leased`), and its own use until the head has it.

Owner: one set, and one connection, per daemon, on its event loop; others read with connections of their own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

from localrun.access.keys import Key, KeyFile
from localrun.access.quotas import BucketLevel, Leased, Quota
from localrun.stored import transaction

FILE_NAME = "usage.db"
# The event loop waits for another writer so long, and then tries with the next request.
_BUSY_TIMEOUT_S = 0.02


@cache
def _schema() -> str:
    return Path(__file__).with_name("usage.sql").read_text(encoding="utf-8")


_COUNT = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
  requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
  cached_tokens = cached_tokens + excluded.cached_tokens, output_tokens = output_tokens + excluded.output_tokens
"""
_PUT = """
INSERT INTO elsewhere VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
  requests = max(requests, excluded.requests), prompt_tokens = max(prompt_tokens, excluded.prompt_tokens),
  cached_tokens = max(cached_tokens, excluded.cached_tokens), output_tokens = max(output_tokens, excluded.output_tokens)
"""
_KEEP = "INSERT OR REPLACE INTO level VALUES (?, ?, ?, ?, ?)"
BY = ("key", "day", "model")

_log = logging.getLogger(__name__)


class UsageRecord(NamedTuple):
    """What one answer of a key took. `n_requests` is 1 for the first one of a request, 0 for others."""

    key: str
    model: str
    n_requests: int
    n_prompt: int
    n_cached: int
    n_output: int


class Sum(NamedTuple):
    """What a door counted in all, of one day, key and model."""

    day: str
    key: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


_COLUMNS = ", ".join(Sum._fields)


class Total(NamedTuple):
    """One row of what was used; `name` is a key, a day or a model."""

    name: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def day_of(at_s: float) -> str:
    """The local day, as 2026-11-23."""
    return time.strftime("%Y-%m-%d", time.localtime(at_s))


class UsageFile:
    """See the module. The file is made by the first write."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._db: sqlite3.Connection | None = None
        self._waiting_counts: dict[tuple[str, str, str], tuple[int, int, int, int]] = {}
        self._waiting_levels: dict[tuple[str, str, float], tuple[object, ...]] = {}
        self._has_warned = False
        self.n_writes = 0

    def write(self, key_id: str, levels: Iterable[BucketLevel], used: UsageRecord | None, now_s: float) -> None:
        """One transaction with all of it, and what could not be written before. Never raises."""
        self.n_writes += 1
        if used is not None:
            whose, counts = (day_of(now_s), used.key, used.model), used[2:]
            before = self._waiting_counts.get(whose, (0, 0, 0, 0))
            self._waiting_counts[whose] = tuple(map(sum, zip(before, counts, strict=True)))  # type: ignore[assignment]
        for level in levels:
            self._waiting_levels[key_id, level.kind, level.per_s] = (key_id, *level)
        try:
            self._transact(
                (_COUNT, [whose + counts for whose, counts in self._waiting_counts.items()]),
                (_KEEP, list(self._waiting_levels.values())),
            )
        except (sqlite3.Error, OSError) as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("what keys use is not written to %s for now: %s", self.path, error)
            return
        self._waiting_counts.clear()
        self._waiting_levels.clear()
        self._has_warned = False

    def _transact(self, *changes: tuple[str, Sequence[tuple[object, ...]]]) -> None:
        db = self._opened()
        with transaction(db):
            for statement, rows in changes:
                db.executemany(statement, rows)

    def put(self, door: str, sums: Sequence[Sum]) -> None:
        """What a door has told. Raises sqlite3.Error, and OSError."""
        if sums:
            self._transact((_PUT, [(*one, door) for one in sums]))

    def untold(self, n_most: int) -> list[Sum]:
        """In a thread: so many of the sums that the head does not have. They are on the disk, or after a loss of power
        there could be smaller ones. Raises sqlite3.Error."""
        told = f"SELECT {_COLUMNS} FROM elsewhere WHERE door = ''"
        with self._reading() as db:
            rows = db.execute(f"SELECT {_COLUMNS} FROM usage EXCEPT {told} LIMIT ?", (n_most,))
            found = [Sum(*row) for row in rows]
        if found:
            self.checkpoint()
        return found

    def levels(self, key_id: str) -> list[BucketLevel]:
        """What was written down of a key's buckets."""
        if not self.path.exists():
            return []
        try:
            rows = self._opened().execute("SELECT kind, per_s, level, at_s FROM level WHERE key_id = ?", (key_id,))
            return [BucketLevel(*row) for row in rows]
        except sqlite3.Error as error:
            _log.warning("what keys have used cannot be read from %s: %s", self.path, error)
            return []

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _opened(self) -> sqlite3.Connection:
        if self._db is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # SQLite gives its other files the mode of this one.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            db = sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            # Copying the log into the file waits for the disk, which is no business of the event loop (`checkpoint`).
            db.execute("PRAGMA wal_autocheckpoint = 0")
            db.executescript(_schema())
            self._db = db
        return self._db

    def checkpoint(self) -> None:
        """In a thread, now and then: what is in the log goes into the file."""
        if self.path.exists():
            with closing(sqlite3.connect(self.path, timeout=1.0)) as db:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def totals(self, by: str, *, since_day: str = "", key: str | None = None) -> list[Total]:
        """In a thread: what was used since a day, by key, day or model, of one key or of all."""
        assert by in BY
        where, values = "day >= ?", [since_day]
        if key is not None:
            where, values = f"{where} AND key = ?", [since_day, key]
        sums = "sum(requests), sum(prompt_tokens), sum(cached_tokens), sum(output_tokens)"
        own, others = f"SELECT {_COLUMNS} FROM usage", f"SELECT {_COLUMNS} FROM elsewhere WHERE door != ''"
        with self._reading() as db:
            found = f"FROM ({own} UNION ALL {others}) WHERE {where}"
            rows = db.execute(f"SELECT {by}, {sums} {found} GROUP BY {by} ORDER BY {by}", values)
            return [Total(*row) for row in rows]

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own, for a thread."""
        path = self.path if os.path.lexists(self.path) else ":memory:"  # a loop of links is no empty book
        with closing(sqlite3.connect(path, timeout=1.0)) as db:
            db.executescript(_schema())
            yield db


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
# made and revoked), without what was asked or answered. A file that is larger than `MAX_AUDIT_BYTES` becomes
# `audit.jsonl.1`, and so on; `N_OLD_AUDITS` of them are kept.

MAX_AUDIT_BYTES = 1024 * 1024
N_OLD_AUDITS = 4


class AuditLog:
    """See above. Mode 0600. Never raises: what cannot be written is in the daemon's log."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "audit.jsonl"

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
                is_full = os.fstat(descriptor).st_size >= MAX_AUDIT_BYTES
            finally:
                os.close(descriptor)
            if is_full:
                self._rotate()
        except OSError as error:
            _log.warning("%s cannot be written (%s): %s", self.path, error.strerror, line.decode("ascii").strip())

    def _rotate(self) -> None:
        old = [self.path.with_name(f"{self.path.name}.{number}") for number in range(1, N_OLD_AUDITS + 1)]
        for newer, older in reversed([*pairwise([self.path, *old])]):
            if newer.exists():
                os.replace(newer, older)
