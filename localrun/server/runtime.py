"""Everything the daemon has, put together: store, renderer, media, supervisor, registry, telemetry.

One per daemon, on its event loop. The API modules get it and use `job`; `native/` shows what it knows.

How it ends, in this order: `request_shutdown` (from a signal handler or the shutdown route; sets
`shutdown_requested`, refuses new jobs, ends event streams), then `stop`, which gives running jobs `STOP_GRACE_S` to end
in peace and then ends the engines, whereupon what still runs gets Unavailable. Whoever runs the HTTP server waits for
`shutdown_requested`, awaits `stop`, and closes the server after it: a server that waited for its connections first
would wait for streams that only `stop` ends.

Does not: listen on a port, or install signal handlers (app.py does).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Sequence
from typing import Protocol

from localrun import kv_folders
from localrun.access.books import Books, OwnBooks
from localrun.config import Settings, folders, model_dirs, models_folder
from localrun.errors import BadRequest, LocalrunError, ModelNotFound
from localrun.hardware import kernels, thread_choice
from localrun.last_model import remember_model
from localrun.models import builtin
from localrun.models.name import split_adapters
from localrun.models.storage import hub_cache
from localrun.models.storage.store import Store
from localrun.server.batches.service import BatchService
from localrun.server.cache import Cache
from localrun.server.engines.link import ENGINE_COMMAND, EngineLink
from localrun.server.engines.resident import Engines, Use
from localrun.server.engines.supervisor import Supervisor
from localrun.server.http import path_redaction
from localrun.server.http.access import Access
from localrun.server.http.exchange import LoopWatch
from localrun.server.jobs.registry import Jobs, Registry
from localrun.server.media.decoder import MediaDecoder
from localrun.server.media.sources import Fetcher
from localrun.server.metering.live_gauges import Nodes
from localrun.server.metering.logs import LogFeed
from localrun.server.metering.telemetry import Telemetry
from localrun.server.metering.traffic import Traffic
from localrun.server.openai.responses.kept import KeptResponses
from localrun.server.pulls import Pulls
from localrun.server.quantizer import Quantizer
from localrun.server.targets import Targets, last_loaded_file
from localrun.server.workers import TemplateRenderer
from localrun.snapshot import EngineRow

_log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
CHECKPOINT_EVERY_S = 60.0


class View(Nodes, Protocol):
    """The engines elsewhere: a row for each, this daemon's link to it if one is open, and whether a model is theirs."""

    def rows(self) -> list[EngineRow]: ...
    def link_of(self, row: EngineRow) -> EngineLink | None: ...
    def runs(self, name: str) -> bool: ...


class Elsewhere(Protocol):
    """Engines on other machines, which it lends before this one's are asked, and who keeps the books of all of them."""

    @property
    def view(self) -> View: ...
    def books(self, own: OwnBooks) -> Books: ...
    def lender(self, own: Engines, store: Store) -> Engines: ...
    def start(self) -> None: ...
    async def stop(self) -> None: ...


class Runtime:
    """See the module. `engine_command` runs engines that are not llama.cpp's: nothing is asked about its build."""

    def __init__(
        self,
        settings: Settings,
        *,
        store: Store | None = None,
        engine_command: Sequence[str] = ENGINE_COMMAND,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        is_llama = engine_command == ENGINE_COMMAND
        kv_folder = kv_folders.kv_folder(folders().cache)
        self.settings = settings
        self.store = store if store is not None else _store(settings, is_llama=is_llama)
        self.quantizer = Quantizer(self.store, n_threads=settings.threads)
        self.renderer = TemplateRenderer(
            timeout_s=settings.template_timeout_s, output_bytes=settings.template_output_bytes
        )
        self.media = MediaDecoder(
            folders().cache / "media", fetcher=Fetcher() if settings.fetch_images == "on" else None
        )
        own = folders()
        books = OwnBooks(own.data)
        self.access = Access(settings, books if elsewhere is None else elsewhere.books(books), state=own.state)
        # Files that keys have sent: the key's ID and the digest.
        self.sent_blobs: set[tuple[str, str]] = set()
        # What there is on other machines, if this one is in a cluster.
        self.view: View | None = None if elsewhere is None else elsewhere.view
        self.registry = Registry(self._node_of)
        self.loop_watch = LoopWatch()
        self.logs = LogFeed()
        self.traffic = Traffic()
        self.telemetry = Telemetry(
            settings, self.registry, self.engine_rows, lambda: self.batch_service.rows(),
            lambda name: self.supervisor.loaded_as(name), self.view,
        )  # fmt: skip
        self.telemetry.metrics.registry.register(self.loop_watch)
        self.supervisor = Supervisor(
            settings,
            self.store,
            command=engine_command,
            on_step=self.telemetry.engine_step,
            on_loaded=self._engine_loaded,
            on_ended=self.telemetry.engine_ended,
            kv_folder=kv_folder,
            threads_file=folders().cache / thread_choice.FILE_NAME,
            kernels_folder=kernels.folder(folders().cache) if is_llama else None,
        )
        # Who has engines: this machine, and others if it is in a cluster.
        self._elsewhere = elsewhere
        lender: Engines = self.supervisor if elsewhere is None else elsewhere.lender(self.supervisor, self.store)
        self.responses = KeptResponses()
        # Asking the GPUs takes a process: one question at a time.
        self.asks_gpus = asyncio.Lock()
        self.targets = Targets(settings, self.store, self.supervisor.residents, self.rows_elsewhere)
        self.cache = Cache(
            settings=settings,
            store=self.store,
            residents=self.supervisor.residents,
            folder=kv_folder,
            elsewhere=self.rows_elsewhere,
        )
        self.pulls = Pulls(
            self.store, journal=folders().state / "pulls.json", rate_bytes_per_s=settings.pull_rate_bytes_per_s
        )
        self.shutdown_requested = asyncio.Event()
        self.jobs = Jobs(
            settings=settings, registry=self.registry, names=self.targets, lender=lender, observer=self.telemetry,
            recorder=self.traffic, is_stopping=self.shutdown_requested.is_set,
        )  # fmt: skip
        self.job = self.jobs.new
        self.batch_service = BatchService(
            folders().data / "batches", settings, targets=self.targets, capacity=lender,
            registry=self.registry, access=self.access,
            telemetry=self.telemetry, is_stopping=self.shutdown_requested.is_set,
        )  # fmt: skip
        self._stopped: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts what runs beside requests. Models are loaded by requests."""
        self.logs.start()
        await self.renderer.start()
        await self.media.start()
        self.supervisor.start()
        if self._elsewhere is not None:
            self._elsewhere.start()
        await self.pulls.start()
        self._checkpoints = asyncio.create_task(self._checkpoint())
        self.batch_service.start()

    def request_shutdown(self) -> None:
        """Begins the end; returns at once. Safe to call again."""
        self.shutdown_requested.set()

    async def stop(self) -> None:
        """Waits up to `STOP_GRACE_S` for running jobs, then ends everything. Safe to call again: there is one end."""
        self.request_shutdown()
        if self._stopped is None:
            self._stopped = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopped)

    async def _stop(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.registry.idle.wait(), STOP_GRACE_S)
        await self.batch_service.stop()
        await self.pulls.stop()
        if self._elsewhere is not None:
            await self._elsewhere.stop()
        await self.supervisor.stop()
        await self.renderer.stop()
        await self.media.stop()
        self.logs.stop()
        self._checkpoints.cancel()
        self.access.close()

    async def _checkpoint(self) -> None:
        """What keys used goes from SQLite's log into the file, without a request that waits for it."""
        while True:
            await asyncio.sleep(CHECKPOINT_EVERY_S)
            with contextlib.suppress(sqlite3.Error, OSError):
                await asyncio.to_thread(self.access.usage.checkpoint)

    def _engine_loaded(self, link: EngineLink) -> None:
        self.telemetry.engine_loaded(link)
        resident = next(one for one in self.supervisor.residents() if one.link is link)
        # In a thread: a disk may take its time.
        asyncio.get_running_loop().run_in_executor(
            None, remember_model, last_loaded_file(resident.use), resident.model.name
        )

    async def metrics_page(self, accept: str) -> tuple[bytes, str]:
        """The page for Prometheus and its content type, without the series of models that are gone."""
        loaded = {row.model for row in self.engine_rows()}
        unloaded = self.telemetry.metrics.models(but=loaded)
        for name in await asyncio.to_thread(self._gone, unloaded) if unloaded else ():
            if not self.supervisor.loaded_as(name):
                _log.info("%s is gone, and its series leave /metrics", name)
                self.telemetry.metrics.forget(name)
        return self.telemetry.metrics.page(accept)

    def _gone(self, names: Sequence[str]) -> list[str]:
        """Those that are in the store no more."""
        gone = []
        for name in names:
            try:
                self.store.resolve(name)
            except ModelNotFound:
                gone.append(name)
            except LocalrunError:
                continue  # it is damaged, and may be mended
        return gone

    def engine_rows(self) -> list[EngineRow]:
        """One for each engine, of this machine and elsewhere: for whoever shows what is loaded."""
        rows = self.supervisor.loaded()
        if self.view is not None:
            for row in rows:
                row.node = self.view.node
        return rows + self.rows_elsewhere()

    def contexts(self) -> dict[str, int]:
        """The most tokens of a request to each model that is loaded; with two engines, to the one that generates."""
        ready = [row for row in self.engine_rows() if row.state == "ready"]
        ready.sort(key=lambda row: row.use == Use.TEXT)
        return {row.model: row.n_ctx for row in ready}

    def rows_elsewhere(self) -> list[EngineRow]:
        return [] if self.view is None else self.view.rows()

    async def unload(self, name: str) -> bool:
        """As the supervisor does, for whoever asks by the API. Raises BadRequest for a model of the cluster."""
        if self.view is not None and self.view.runs(split_adapters(name).model):
            raise BadRequest(
                f"'{name}' runs in the cluster, where no request unloads it: `localrun cluster deploy {name} "
                f"--replicas 0` takes it back",
                field="model",
            )
        return await self.supervisor.unload(name)

    def _node_of(self, model: str) -> str:
        return "" if self.view is None or self.view.runs(model) else self.view.node


def _store(settings: Settings, *, is_llama: bool) -> Store:
    no_projectors = ""
    if settings.projectors == "off":
        no_projectors = "projectors are not used (the setting projectors is off)"
    elif is_llama and not kernels.has_media_library():
        no_projectors = (
            "projectors cannot be used: llama.cpp was built without libmtmd (`localrun doctor` says what to do)"
        )
    built_in = builtin.model_path().parent
    path_redaction.hide((models_folder(settings), *model_dirs(settings), hub_cache.folder(), built_in))
    return Store.of(settings, no_projectors=no_projectors)
