"""Files, batches, their lines and results, in SQLite: what is known of offline work, across restarts.

Owner: one thread of the daemon (`service.py`), the only writer; every call is one short transaction. Write-ahead log
with `synchronous=NORMAL`: what was committed outlives the process, whatever ends it. A power cut may lose the last
results, never make half of one, and what is not there is computed again.

Invariants: a line has at most one result (the primary key of `results`), which is written together with the batch's
counts; the counts are the results' own. Once a batch's files are written (`files.py`), its lines and results are
deleted in the transaction that ends it. Lists are read by an index, a page at a time, however long a batch is.

Does not: touch the contents of files, run lines, or know what they say.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from enum import IntEnum, StrEnum
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from localrun.errors import Conflict, NotFound, StorageExceeded, Unavailable
from localrun.stored import transaction

VERSION = 2


class Api(StrEnum):
    """Whose batches: they look different, and are listed apart."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Kind(IntEnum):
    """What came of a line."""

    SUCCEEDED = 1
    ERRORED = 2
    CANCELED = 3
    EXPIRED = 4


class Ending(StrEnum):
    """How a batch is about to end, from when no more lines are computed. `NONE` still runs, `DONE` has ended."""

    NONE = ""
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DONE = "done"


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one line's answer."""

    n_input: int = 0
    n_cached: int = 0
    n_output: int = 0
    n_thinking: int = 0


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded file, or what a batch wrote. Its content is in the folder of blobs, under its id."""

    id: str
    owner: str
    filename: str
    purpose: str
    size_bytes: int
    created_at: int
    expires_at: int | None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are seconds since 1970. `input_file_id` is the blob that its lines are in."""

    seq: int
    id: str
    owner: str
    api: Api
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    ending: Ending
    model: str | None
    metadata: str | None
    errors: str | None
    output_file_id: str | None
    error_file_id: str | None
    output_expires_s: int | None
    created_at: float
    expires_at: float
    in_progress_at: float | None
    finalizing_at: float | None
    completed_at: float | None
    failed_at: float | None
    expired_at: float | None
    cancelling_at: float | None
    cancelled_at: float | None
    archived_at: float | None
    n_lines: int
    n_succeeded: int
    n_errored: int
    n_canceled: int
    n_expired: int
    n_input_tokens: int
    n_cached_tokens: int
    n_output_tokens: int
    n_thinking_tokens: int

    @property
    def has_ended(self) -> bool:
        return self.ending is Ending.DONE


class Line(NamedTuple):
    """One request of a batch: where it is in the input, and its place in the order of running."""

    place: int
    line: int
    custom_id: str
    model: str
    offset: int
    size_bytes: int


class Result(NamedTuple):
    """What came of a line; `body` is None where nothing was computed."""

    line: int
    custom_id: str
    kind: Kind
    body: bytes | None


class Page(NamedTuple):
    """Rows of a list, and whether there are more after them."""

    rows: list[Any]
    has_more: bool


_T = TypeVar("_T", StoredFile, Batch)
_FILE_COLUMNS = ", ".join(StoredFile.__struct_fields__)
_BATCH_COLUMNS = ", ".join(Batch.__struct_fields__)


class Store:
    """See the module. Raises sqlite3.DatabaseError when made on a file that is none, and Unavailable for one that a
    newer version made."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # counts for a new file only
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA foreign_keys=ON")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise Unavailable(
                    f"{path} was made by a newer localrun (version {version} of its tables, this one knows {VERSION}); "
                    f"use that one, or move the file away"
                )
            if version == 0:
                with transaction(self._db):
                    schema = resources.files("localrun.server.batches").joinpath("schema.sql")
                    for statement in schema.read_text(encoding="utf-8").split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version={VERSION}")
            if version == 1:
                with transaction(self._db):
                    self._db.execute("ALTER TABLE batches ADD COLUMN blob_bytes INTEGER NOT NULL DEFAULT 0")
                    self._db.execute(f"PRAGMA user_version={VERSION}")
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise sqlite3.DatabaseError(found)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    # --- files ---------------------------------------------------------------------------------------------------

    def add_file(self, file: StoredFile, most_bytes: int = 0) -> None:
        """`most_bytes` are what the owner may have with it, 0 is any number. Raises StorageExceeded."""
        with transaction(self._db):
            self.check_storage(file.owner, file.size_bytes, most_bytes)
            self._add_file(file)

    def stored_bytes(self, owner: str) -> int:
        """Of an owner's files, results of batches among them, and of Anthropic's batches, which are no files."""
        (n_bytes,) = self._db.execute(
            "SELECT (SELECT coalesce(sum(size_bytes), 0) FROM files WHERE owner = ?1) + "
            "(SELECT coalesce(sum(blob_bytes), 0) FROM batches WHERE owner = ?1 AND archived_at IS NULL)",
            (owner,),
        ).fetchone()
        return int(n_bytes)

    def check_storage(self, owner: str, n_bytes: int, most_bytes: int) -> None:
        """Raises StorageExceeded where so many more bytes are beyond what the owner may have; 0 is any number."""
        if not most_bytes:
            return
        stored_bytes = self.stored_bytes(owner)
        if stored_bytes + n_bytes > most_bytes:
            raise StorageExceeded(
                f"this API key has {_megabytes(stored_bytes)} of files and batches here"
                f"{f', and {_megabytes(n_bytes)} more' if n_bytes > 1 else ''}; its limit is {_megabytes(most_bytes)}. "
                f"Delete some (DELETE /v1/files/ID or /v1/messages/batches/ID), or ask whoever runs this server for "
                f"more (localrun key set NAME --storage SIZE)"
            )

    def file(self, file_id: str, owner: str) -> StoredFile:
        """Raises NotFound."""
        row = self._db.execute(
            f"SELECT {_FILE_COLUMNS} FROM files WHERE id = ? AND owner = ?", (file_id, owner)
        ).fetchone()
        if row is None:
            raise NotFound(f"file '{file_id[:80]}' is not here; GET /v1/files lists those that are", field="file_id")
        return _made(StoredFile, row)

    def files(self, owner: str, *, purpose: str, after: str, limit: int, is_ascending: bool) -> Page:
        """A page of files. Raises NotFound for a file `after` that is not there."""
        where, values = "owner = ?", [owner]
        if purpose:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        rows, has_more = self._page("files", _FILE_COLUMNS, where, values, after, limit, is_ascending)
        return Page([_made(StoredFile, row) for row in rows], has_more)

    def delete_file(self, file_id: str, owner: str) -> None:
        """Raises NotFound, and Conflict for the input of a batch that still runs."""
        self.file(file_id, owner)
        with transaction(self._db):
            using = self._db.execute(
                "SELECT id FROM batches WHERE ending != 'done' AND input_file_id = ?", (file_id,)
            ).fetchone()
            if using is not None:
                raise Conflict(f"'{file_id}' is the input of the batch '{using[0]}', which still runs; cancel it first")
            self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def take_expired_files(self, now: float) -> list[str]:
        """Forgets files whose time has come, except the inputs of batches that still run. Their ids."""
        with transaction(self._db):
            rows = self._db.execute(
                "DELETE FROM files WHERE expires_at <= ? AND id NOT IN "
                "(SELECT input_file_id FROM batches WHERE ending != 'done') RETURNING id",
                (now,),
            ).fetchall()
        return [row[0] for row in rows]

    # --- batches -------------------------------------------------------------------------------------------------

    def add_batch(self, values: dict[str, Any], lines: Sequence[Line] = (), most_bytes: int = 0) -> Batch:
        """A new batch of these columns; with `lines` it runs at once, else it is to be validated. Raises
        StorageExceeded for an owner who has `most_bytes` already. What comes of it is kept all the same."""
        names = ", ".join(values)
        with transaction(self._db):
            self.check_storage(values["owner"], max(1, values.get("blob_bytes", 0)), most_bytes)
            cursor = self._db.execute(
                f"INSERT INTO batches ({names}) VALUES ({', '.join('?' * len(values))})", tuple(values.values())
            )
            assert cursor.lastrowid is not None
            self._add_lines(cursor.lastrowid, lines)
        return self._by_seq(cursor.lastrowid)

    def start(self, seq: int, lines: Sequence[Line], model: str | None, now: float) -> None:
        """The input was found good: its lines run from now on, unless the batch was cancelled meanwhile."""
        with transaction(self._db):
            changed = self._db.execute(
                "UPDATE batches SET status = 'in_progress', in_progress_at = ?, model = ? "
                "WHERE seq = ? AND status = 'validating'",
                (now, model, seq),
            ).rowcount
            if changed:
                self._add_lines(seq, lines)

    def fail(self, seq: int, errors: list[dict[str, Any]], now: float) -> None:
        """The input was found bad, and the batch has ended."""
        with transaction(self._db):
            self._db.execute(
                "UPDATE batches SET status = 'failed', failed_at = ?, errors = ?, ending = 'done' "
                "WHERE seq = ? AND status = 'validating'",
                (now, json.dumps(errors), seq),
            )

    def batch(self, batch_id: str, owner: str, api: Api) -> Batch:
        """Raises NotFound."""
        row = self._db.execute(
            f"SELECT {_BATCH_COLUMNS} FROM batches WHERE id = ? AND owner = ? AND api = ?", (batch_id, owner, api)
        ).fetchone()
        if row is None:
            raise NotFound(f"batch '{batch_id[:80]}' is not known here", field="batch_id")
        return _made(Batch, row)

    def batches(self, owner: str, api: Api, *, after: str, limit: int, is_ascending: bool = False) -> Page:
        """A page of batches, newest first. Raises NotFound for a batch `after` that is not there."""
        rows, has_more = self._page(
            "batches", _BATCH_COLUMNS, "owner = ? AND api = ?", [owner, api], after, limit, is_ascending
        )
        return Page([_made(Batch, row) for row in rows], has_more)

    def open_batches(self) -> list[Batch]:
        """All that have not ended, oldest first."""
        rows = self._db.execute(f"SELECT {_BATCH_COLUMNS} FROM batches WHERE ending != 'done' ORDER BY seq")
        return [_made(Batch, row) for row in rows.fetchall()]

    def pending(self, seq: int, after: int, limit: int) -> list[Line]:
        """The next lines without a result, in order of running, from after this place."""
        rows = self._db.execute(
            "SELECT place, line, custom_id, model, offset, size_bytes FROM lines WHERE batch = ? AND place > ? "
            "AND NOT EXISTS (SELECT 1 FROM results WHERE results.batch = lines.batch AND results.place = lines.place) "
            "ORDER BY place LIMIT ?",
            (seq, after, limit),
        )
        return [Line(*row) for row in rows.fetchall()]

    def record(self, seq: int, place: int, kind: Kind, body: bytes, usage: Usage) -> bool:
        """A line's result, and the counts with it. Of two results of a line the first one stays, and a batch that no
        longer runs takes none: then False."""
        column = "n_succeeded" if kind is Kind.SUCCEEDED else "n_errored"
        with transaction(self._db):
            if self._ending(seq) is not Ending.NONE:
                return False
            added = self._db.execute(
                "INSERT OR IGNORE INTO results (batch, place, kind, body) VALUES (?, ?, ?, ?)", (seq, place, kind, body)
            ).rowcount
            if added:
                self._db.execute(
                    f"UPDATE batches SET {column} = {column} + 1, n_input_tokens = n_input_tokens + ?, "
                    f"n_cached_tokens = n_cached_tokens + ?, n_output_tokens = n_output_tokens + ?, "
                    f"n_thinking_tokens = n_thinking_tokens + ? WHERE seq = ?",
                    (usage.n_input, usage.n_cached, usage.n_output, usage.n_thinking, seq),
                )
        return bool(added)

    def cancel(self, batch_id: str, owner: str, api: Api, now: float) -> Batch:
        """No more lines are computed. Raises NotFound, and Conflict for a batch that has ended."""
        batch = self.batch(batch_id, owner, api)
        if batch.has_ended:
            raise Conflict(f"batch '{batch.id}' has ended already ({batch.status}); there is nothing to cancel")
        with transaction(self._db):
            self._db.execute(
                "UPDATE batches SET status = 'cancelling', cancelling_at = ?, ending = ? WHERE seq = ? AND ending = ''",
                (now, Ending.CANCELLED, batch.seq),
            )
        return self._by_seq(batch.seq)

    def begin_end(self, seq: int, ending: Ending, now: float) -> Batch:
        """The batch computes no more; lines without a result get one that says so. May be called again."""
        kind, column = (Kind.EXPIRED, "n_expired") if ending is Ending.EXPIRED else (Kind.CANCELED, "n_canceled")
        with transaction(self._db):
            n_left = self._db.execute(
                "INSERT OR IGNORE INTO results (batch, place, kind) SELECT batch, place, ? FROM lines WHERE batch = ?",
                (kind, seq),
            ).rowcount
            self._db.execute(
                f"UPDATE batches SET {column} = {column} + ?, ending = ?, "
                f"finalizing_at = CASE WHEN ? THEN finalizing_at ELSE coalesce(finalizing_at, ?) END, "
                f"status = CASE WHEN ? THEN status ELSE 'finalizing' END WHERE seq = ?",
                (n_left, ending, ending is Ending.CANCELLED, now, ending is Ending.CANCELLED, seq),
            )
        return self._by_seq(seq)

    def finish(self, seq: int, output: StoredFile | None, error: StoredFile | None, now: float) -> None:
        """The batch has ended, and its files are there. Files of batches that are not OpenAI's are not listed."""
        batch = self._by_seq(seq)
        assert batch.ending not in (Ending.NONE, Ending.DONE)
        n_unlisted = output.size_bytes if output is not None and batch.api is Api.ANTHROPIC else 0
        with transaction(self._db):
            for file in (output, error):
                if file is not None and batch.api is Api.OPENAI:
                    self._add_file(file)
            self._db.execute(
                f"UPDATE batches SET status = ?, {batch.ending}_at = ?, ending = 'done', output_file_id = ?, "
                f"error_file_id = ?, blob_bytes = blob_bytes + ? WHERE seq = ?",
                (batch.ending, now, output and output.id, error and error.id, n_unlisted, seq),
            )
            self._db.execute("DELETE FROM results WHERE batch = ?", (seq,))
            self._db.execute("DELETE FROM lines WHERE batch = ?", (seq,))
        self._db.execute("PRAGMA incremental_vacuum").fetchall()

    def archive(self, before: float, now: float) -> list[str]:
        """Forgets the results of Anthropic's batches that were made before that. The blobs to delete."""
        with transaction(self._db):
            rows = self._db.execute(
                "UPDATE batches SET archived_at = ? WHERE api = ? AND ending = 'done' AND archived_at IS NULL "
                "AND created_at < ? RETURNING input_file_id, output_file_id",
                (now, Api.ANTHROPIC, before),
            ).fetchall()
        return [name for row in rows for name in row if name]

    def delete_batch(self, batch_id: str, owner: str, api: Api) -> list[str]:
        """Forgets a batch that has ended. The blobs that were its alone. Raises NotFound, and Conflict."""
        batch = self.batch(batch_id, owner, api)
        if not batch.has_ended:
            raise Conflict(f"batch '{batch.id}' still runs; cancel it first")
        with transaction(self._db):
            self._db.execute("DELETE FROM batches WHERE seq = ?", (batch.seq,))
        return [name for name in (batch.input_file_id, batch.output_file_id) if name]

    def blobs(self) -> set[str]:
        """The names of all blobs that something refers to."""
        rows = self._db.execute(
            "SELECT id FROM files UNION SELECT input_file_id FROM batches "
            "UNION SELECT output_file_id FROM batches WHERE output_file_id IS NOT NULL"
        )
        return {row[0] for row in rows.fetchall()}

    # --- inside --------------------------------------------------------------------------------------------------

    def _page(
        self, table: str, columns: str, where: str, values: Sequence[Any], after: str, limit: int, is_ascending: bool
    ) -> tuple[list[Any], bool]:
        bound: tuple[Any, ...] = ()
        if after:
            row = self._db.execute(f"SELECT seq FROM {table} WHERE id = ? AND {where}", (after, *values)).fetchone()
            if row is None:
                raise NotFound(f"'{after[:80]}' is not there to go on after; begin again without it", field="after")
            where, bound = f"{where} AND seq {'>' if is_ascending else '<'} ?", (row[0],)
        rows = self._db.execute(
            f"SELECT {columns} FROM {table} WHERE {where} ORDER BY seq {'ASC' if is_ascending else 'DESC'} LIMIT ?",
            (*values, *bound, limit + 1),
        ).fetchall()
        return rows[:limit], len(rows) > limit

    def _add_file(self, file: StoredFile) -> None:
        self._db.execute(
            f"INSERT INTO files ({_FILE_COLUMNS}) VALUES ({', '.join('?' * len(StoredFile.__struct_fields__))})",
            msgspec.structs.astuple(file),
        )

    def _add_lines(self, seq: int, lines: Sequence[Line]) -> None:
        self._db.executemany(
            "INSERT INTO lines (batch, place, line, custom_id, model, offset, size_bytes) VALUES (?, ?, ?, ?, ?, ?, ?)",
            ((seq, *line) for line in lines),
        )
        self._db.execute("UPDATE batches SET n_lines = ? WHERE seq = ?", (len(lines), seq))

    def _by_seq(self, seq: int) -> Batch:
        return _made(Batch, self._db.execute(f"SELECT {_BATCH_COLUMNS} FROM batches WHERE seq = ?", (seq,)).fetchone())

    def _ending(self, seq: int) -> Ending | None:
        row = self._db.execute("SELECT ending FROM batches WHERE seq = ?", (seq,)).fetchone()
        return None if row is None else Ending(row[0])


def read_results(path: Path, seq: int) -> Iterator[Result]:
    """All results of a batch that computes no more, in order of running, on a connection of its own: they may be many,
    and others want the store meanwhile. Raises sqlite3.Error."""
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute(
            "SELECT line, custom_id, kind, body FROM results JOIN lines USING (batch, place) WHERE batch = ? "
            "ORDER BY place",
            (seq,),
        )
        for line, custom_id, kind, body in rows:
            yield Result(line, custom_id, Kind(kind), body)


def new_id(prefix: str) -> str:
    """An id that nothing here had before, and that is safe as the name of a file."""
    return prefix + secrets.token_hex(16)


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 100_000 else f"{n_bytes} bytes"


def _made(kind: type[_T], row: Sequence[Any]) -> _T:
    """Of the columns of `kind`, in their order."""
    return msgspec.convert(dict(zip(kind.__struct_fields__, row, strict=True)), kind)
