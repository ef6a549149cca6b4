"""A daemon's door to the cluster: it follows which replicas there are, and lends them to the daemon's jobs.

An app is taken when the bridge tells of it. The door has the model's files, the same that the replicas were told, or
gets their cards from a node, with template and vocabulary (`catalogue.py`). What goes on on an app that is taken back,
or replaced by another description, ends there in peace; new requests do not come to it.

Runs in the daemon's event loop. Does not: import Ray, or give up what it knows when its bridge or the head is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from localrun import __version__
from localrun.cluster import frames, settings, tls
from localrun.cluster.catalogue import Shelf, neighbours
from localrun.cluster.description import Description, use_of
from localrun.cluster.lender import App, ClusterLender
from localrun.cluster.link import ClusterLink
from localrun.cluster.reports import AppReport, ClusterReport, Watch
from localrun.cluster.wire_child import Address
from localrun.config import folders
from localrun.errors import DownloadFailed, LocalrunError, ModelNotFound, Unavailable
from localrun.models.storage.store import Store
from localrun.server.jobs.job import Lender

LOOK_AGAIN_S = 1.0
TAKE_AGAIN_S = 5.0

_log = logging.getLogger(__name__)


class Door:
    """See the module, and `runtime.Elsewhere`."""

    def __init__(self) -> None:
        self._token, self._member = settings.frames_token(), settings.membership()
        self._tls = tls.for_doors(folders().state) if self._member.is_encrypted else None
        self._shelf: Shelf | None = None
        self._files_at: tuple[str, ...] = ()  # where other nodes give files
        self._apps: dict[str, App] = {}  # by the model's name
        # Which this door cannot take, and why; without the description it tries again.
        self._refused: dict[str, tuple[Description | None, str]] = {}
        self._taking: set[str] = set()
        self._watch = Watch(self._on_report)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def lender(self, own: Lender, store: Store) -> Lender:
        self._shelf = Shelf(store)
        return ClusterLender(own, self.find)

    def start(self) -> None:
        self._watch.start()

    async def stop(self) -> None:
        """What still runs on replicas is cancelled."""
        self._is_closed = True
        await self._watch.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(app.link.stop() for app in self._apps.values()))

    def find(self, name: str) -> App | None:
        """The cluster's app of this name. Raises Unavailable at the end and while this door takes it, and
        ModelNotFound for one that it cannot take."""
        if self._is_closed:
            raise Unavailable("localrun is shutting down")
        name = name.removesuffix(":latest")
        if name in self._refused:
            raise ModelNotFound(name, self._refused[name][1])
        if name in self._taking and name not in self._apps:
            raise Unavailable(f"'{name}' is about to be the cluster's; try again in a moment")
        return self._apps.get(name)

    # --- inside --------------------------------------------------------------------------------------------------

    def _on_report(self, report: ClusterReport) -> None:
        others = (node.files_address for node in report.nodes if node.node != self._member.node)
        self._files_at = tuple(filter(None, others))
        told = {one.description.model.removesuffix(":latest"): one for one in report.apps}
        for name in set(self._apps) - set(told):
            self._leave(name)
        self._refused = {name: why for name, why in self._refused.items() if name in told}
        for name, one in told.items():
            app = self._apps.get(name)
            if app is not None and app.fingerprint == one.description.fingerprint:
                app.link.replicas(_addresses(one))
            elif name not in self._taking and self._refused.get(name, (None, ""))[0] != one.description:
                self._taking.add(name)
                self._spawn(self._take(name, one))

    async def _take(self, name: str, told: AppReport) -> None:
        """Reads the model's files, or gets its card."""
        assert self._shelf is not None
        said = told.description
        try:
            model = await self._shelf.put(said, neighbours(self._member, self._files_at))
        except (LocalrunError, OSError) as error:
            _log.warning("the cluster's '%s' cannot be used from here: %s", name, error)
            self._leave(name)
            for_now = isinstance(error, DownloadFailed)
            why = f"the cluster runs it, and this machine cannot show it: {error}"
            self._refused[name] = None if for_now else said, why
            if for_now:
                await asyncio.sleep(TAKE_AGAIN_S)
            return
        finally:
            self._taking.discard(name)
        self._refused.pop(name, None)
        before = self._apps.get(name)
        if before is not None:
            self._spawn(_ended(before.link))
        hello = frames.Hello(protocol=frames.PROTOCOL, version=__version__, token=self._token, app=said.fingerprint)
        # An engine's totals are counted where it runs.
        link = ClusterLink(model=model.name, hello=hello, tls=self._tls, on_step=lambda *_: None)
        link.replicas(_addresses(told))
        self._apps[name] = App(model, said.fingerprint, link, use_of(model.header), said.adapter_digests)
        _log.info("'%s' is the cluster's", name)

    def _leave(self, name: str) -> None:
        app = self._apps.pop(name, None)
        if self._shelf is not None:
            self._shelf.take_away(name)
        if app is not None:
            _log.info("'%s' is no longer the cluster's, or not as it was", name)
            self._spawn(_ended(app.link))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _addresses(told: AppReport) -> dict[str, Address]:
    """Of replicas that are of the description, and have an engine."""
    return {
        one.id: Address(one.host, one.port, one.node)
        for one in told.replicas
        if one.fingerprint == told.description.fingerprint and not one.why_not
    }


async def _ended(link: ClusterLink) -> None:
    """When nothing runs on it any more."""
    while link.n_requests:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(LOOK_AGAIN_S)
    await link.stop()
