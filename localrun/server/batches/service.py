"""Files and batches of the daemon: opens what is kept of them, answers for the routes, and has the runner run.

The store's calls run in one thread, in the order in which they were asked for. Everything is in one folder, which one
daemon at a time has: another one with the same data folder says so instead of running every line twice. A database that
is damaged is put aside with all of its folder, and a new one begun; whatever else keeps it from being opened is the
answer of these routes alone, and they try again.

Does not: know what HTTP is.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import filelock
import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp

from localrun.config import Settings
from localrun.errors import DiskFull, DiskRefused, LocalrunError, StorageExceeded, Unavailable
from localrun.server.batches import lines
from localrun.server.batches.files import Blobs
from localrun.server.batches.lines import AskedMessage
from localrun.server.batches.runner import Runner
from localrun.server.batches.store import Api, Batch, Line, Store, StoredFile, new_id
from localrun.snapshot import BatchRow

if TYPE_CHECKING:
    from localrun.server.engines.resident import Capacity
    from localrun.server.http.access import Access
    from localrun.server.jobs.registry import Registry
    from localrun.server.metering.telemetry import Telemetry
    from localrun.server.targets import Targets

WINDOW_S = 86_400.0
# OpenAI's default for files with requests.
INPUTS_KEPT_S = 30 * 86_400

_DAMAGED = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, None}
_log = logging.getLogger(__name__)
# Until the folder that could not be opened is tried again.
_RETRY_S = 10.0
T = TypeVar("T")


class BatchService:
    """See the module. `is_stopping` says that the daemon ends."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        *,
        targets: Targets,
        capacity: Capacity,
        registry: Registry,
        access: Access,
        telemetry: Telemetry,
        is_stopping: Callable[[], bool],
    ) -> None:
        self.blobs = Blobs(folder / "blobs")
        self._folder = folder
        self._database = folder / "batches.db"
        self._access = access
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._lock = filelock.FileLock(folder.with_suffix(".lock"), thread_local=False)
        self._store: Store | None = None
        self._endpoints: dict[str, ASGIApp] = {}
        self._runner = Runner(
            ask=self.ask,
            database=self._database,
            blobs=self.blobs,
            endpoints=self._endpoints,
            capacity=capacity,
            registry=registry,
            access=access,
            telemetry=telemetry,
            targets=targets,
            is_stopping=is_stopping,
            max_line_bytes=settings.max_body_bytes,
        )
        self._opening: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False

    # --- a daemon's life -----------------------------------------------------------------------------------------

    def serve(self, routes: Sequence[Route]) -> None:
        """Before `start`: lines are answered by those of these routes that they may name."""
        names = (*lines.ENDPOINTS, lines.MESSAGES)
        self._endpoints |= {
            one.path: one.endpoint for one in routes if one.path in names and "POST" in (one.methods or ())
        }

    def start(self) -> None:
        """Goes on with the batches of the daemon before, if it has routes for their lines."""
        if not self._endpoints:
            return
        self._opening = asyncio.create_task(self._open())

    async def stop(self) -> None:
        """Gives up the lines that run; they run again when the daemon starts again."""
        self._is_closed = True
        tasks = [task for task in (self._opening, self._running) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._runner.stop()
        await asyncio.to_thread(self._thread.shutdown)
        if self._store is not None:
            self._store.close()
        self._lock.release()

    @property
    def n_running(self) -> int:
        return self._runner.n_open

    def rows(self) -> list[BatchRow]:
        """Batches that have not ended, as people see them."""
        return [msgspec.structs.replace(row, key=self._access.name_of(owner)) for owner, row in self._runner.rows()]

    async def _open(self) -> None:
        """Opens what there is: now, or when a full disk has room again or another daemon has ended."""
        said = ""
        while self._running is None:
            try:
                await self.ask(Store.open_batches)
            except LocalrunError as error:
                if error.message != said:
                    said = error.message
                    _log.warning("batches do not go on: %s", said)
                await asyncio.sleep(_RETRY_S)

    async def ask(self, question: Callable[[Store], T]) -> T:
        """What the store says, in its thread. Raises what the question raises, DiskFull and DiskRefused for what SQLite
        says of the disk, and what opening raises."""
        if self._is_closed:
            raise Unavailable("localrun is shutting down")
        loop = asyncio.get_running_loop()
        try:
            store = await loop.run_in_executor(self._thread, self._opened) if self._store is None else self._store
            if self._running is None:
                self._running = asyncio.create_task(self._runner.run())
            return await loop.run_in_executor(self._thread, question, store)
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise DiskFull(f"the disk of {self._folder} is full; make room and try again") from None
            raise DiskRefused(f"{self._folder}: {error}; nothing was changed") from error

    def _opened(self) -> Store:
        """In the store's thread. Raises Unavailable, OSError and sqlite3.Error."""
        if self._store is not None:
            return self._store
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise Unavailable(
                f"another daemon keeps the files and batches in {self._folder}; ask that one, or stop it"
            ) from None
        self._folder.mkdir(exist_ok=True, mode=0o700)
        try:
            store = Store(self._database)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", None) not in _DAMAGED:
                raise
            aside = self._put_aside()
            _log.warning(
                "%s cannot be read and is now in %s; its batches do not go on: %s", self._database, aside, error
            )
            self._folder.mkdir(mode=0o700)
            store = Store(self._database)
        self.blobs.sweep(store.blobs())
        self._store = store
        return store

    def _put_aside(self) -> Path:
        for number in range(1, 1000):
            aside = self._folder.with_name(f"{self._folder.name}.unreadable-{number}")
            if not aside.exists():
                self._folder.rename(aside)
                return aside
        raise Unavailable(f"{self._folder} cannot be read; move it away, and its copies beside it")

    # --- for the routes ------------------------------------------------------------------------------------------

    async def delete_file(self, file_id: str, owner: str) -> None:
        """Raises NotFound, and Conflict for the input of a batch that still runs."""
        await self.ask(lambda store: store.delete_file(file_id, owner))
        await asyncio.to_thread(self.blobs.delete, [file_id])

    async def create(
        self,
        file: StoredFile,
        *,
        endpoint: str,
        window: str,
        window_s: float,
        metadata: str | None,
        output_expires_s: int | None,
        most_bytes: int,
    ) -> Batch:
        """A batch of OpenAI's, of an uploaded file. Raises StorageExceeded for an owner who has `most_bytes`."""
        now = time.time()
        values = _values(Api.OPENAI, file.owner, new_id("batch_"), endpoint, file.id, now, now + window_s) | {
            "status": "validating", "completion_window": window, "metadata": metadata,
            "output_expires_s": output_expires_s,
        }  # fmt: skip
        return await self._added(values, (), most_bytes)

    async def create_messages(self, asked: Sequence[AskedMessage], owner: str, most_bytes: int) -> Batch:
        """A batch of Anthropic's. Raises BadRequest naming the request, and StorageExceeded."""
        now = time.time()
        found, blob = await asyncio.to_thread(lines.check_requests, asked)
        await asyncio.to_thread(self.blobs.check_room, len(blob))
        # Before anything is written: the folder may be somebody else's.
        await self.ask(lambda store: store.check_storage(owner, len(blob), most_bytes))
        batch_id = new_id("msgbatch_")
        await asyncio.to_thread(self._write, batch_id, blob)
        values = _values(Api.ANTHROPIC, owner, batch_id, lines.MESSAGES, batch_id, now, now + WINDOW_S)
        values |= {"status": "in_progress", "in_progress_at": now, "blob_bytes": len(blob)}
        try:
            return await self._added(values, found, most_bytes)
        except StorageExceeded:
            self.blobs.delete([batch_id])
            raise

    async def cancel(self, batch_id: str, owner: str, api: Api) -> Batch:
        """Raises NotFound, and Conflict for a batch that has ended."""
        batch = await self.ask(lambda store: store.cancel(batch_id, owner, api, time.time()))
        self._runner.changed()
        return batch

    async def delete_batch(self, batch_id: str, owner: str, api: Api) -> None:
        """Raises NotFound, and Conflict for a batch that still runs."""
        gone = await self.ask(lambda store: store.delete_batch(batch_id, owner, api))
        await asyncio.to_thread(self.blobs.delete, gone)

    async def _added(self, values: dict[str, Any], found: Sequence[Line], most_bytes: int) -> Batch:
        batch = await self.ask(lambda store: store.add_batch(values, found, most_bytes))
        self._runner.changed()
        return batch

    def _write(self, blob_id: str, content: bytes) -> None:
        with self.blobs.writing(blob_id) as file:
            file.write(content)


def _values(
    api: Api, owner: str, batch_id: str, endpoint: str, input_id: str, created_at: float, expires_at: float
) -> dict[str, Any]:
    return {
        "id": batch_id, "owner": owner, "api": api, "endpoint": endpoint, "input_file_id": input_id, "ending": "",
        "completion_window": "24h", "created_at": created_at, "expires_at": expires_at,
    }  # fmt: skip
