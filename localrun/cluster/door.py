"""A daemon's door to the cluster: it follows which replicas there are, and gives jobs their engine: the cluster for its
own apps, the machine's supervisor for every other model.

An app is taken when the bridge tells of it. The door has the model's files, the same that the replicas were told, or
gets their cards from a node, with template and vocabulary (`catalogue.py`). What goes on on an app that is taken back,
or replaced by another description, ends there in peace; new requests do not come to it.

A lease of an app is only a permission, since the replica is chosen with the prompt (`link.py`): it takes nothing and
holds nothing. Whether a stream may go on elsewhere is decided by the app's fingerprint, not by files.

Runs in the daemon's event loop. Does not: import Ray, or give up what it knows when its bridge or the head is gone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from localrun import __version__, wire
from localrun.access.books import Books, OwnBooks
from localrun.cluster import frames, settings
from localrun.cluster.catalogue import Shelf, neighbours
from localrun.cluster.description import Description
from localrun.cluster.ledger import Ledger, head_of
from localrun.cluster.link import ClusterLink, Told
from localrun.cluster.reports import AppReport, ClusterReport, Watch
from localrun.cluster.state import State
from localrun.cluster.view import View
from localrun.cluster.wire_child import Address
from localrun.config import NOTHING_ASKED, LoadSettings, folders
from localrun.errors import BadRequest, DownloadFailed, LocalrunError, ModelNotFound, PortBusy, Unavailable
from localrun.models.adapters import AdaptedModel
from localrun.models.name import split_adapters
from localrun.models.storage.model import Model
from localrun.models.storage.store import Store
from localrun.server.engines.link import EngineLink
from localrun.server.engines.resident import Engines, Lease, Use, use_of

# A replica that is started anew has to load its model.
WAIT_S = 120.0


class App(NamedTuple):
    """What the cluster runs under a model's name. `fingerprint` is of everything that its replicas are opened with."""

    model: Model
    fingerprint: str
    link: ClusterLink
    use: Use = Use.TEXT
    adapters: frozenset[str] = frozenset()  # that requests may ask for: 64 hex digits of each


class ClusterLease:
    """See `engines.resident.Lease`."""

    load = NOTHING_ASKED

    def __init__(self, app: App, waited_s: float) -> None:
        self.model, self.identity, self.link = app.model, app.fingerprint, app.link
        self._adapters = app.adapters
        self.waited_s = waited_s

    async def speculation(self, speculates: bool | None, draft: str) -> tuple[bool | None, str]:
        """Raises BadRequest for a draft model of the request's own."""
        if draft:
            raise BadRequest("draft models of single requests do not work in a cluster yet", field="draft_model")
        return speculates, ""

    async def adapters(self, adapted: AdaptedModel) -> tuple[wire.Adapter, ...] | None:
        """By their digests: each replica has its own files. Raises BadRequest for one that the app does not have."""
        if adapted.adapters is None:
            return None
        if not self._adapters.issuperset(each.sha256 for each in adapted.adapters):
            raise BadRequest(
                f"the cluster runs '{self.model.name}' without one of the adapters {', '.join(adapted.shown)}; "
                f"`localrun cluster deploy {self.model.name}` again, where it is, adds all that fit",
                field="model",
            )
        return tuple(wire.Adapter("", bytes.fromhex(each.sha256), each.scale) for each in adapted.adapters)

    def release(self) -> None:
        pass


class ClusterLender:
    """`find` knows the cluster's apps by the names of their models."""

    def __init__(self, own: Engines, find: Callable[[str], App | None]) -> None:
        self._own, self._find = own, find

    def lend(self, name: str, keep_alive_s: float | None, use: Use, load: LoadSettings) -> Lease | None:
        app = self._find(split_adapters(name).model)
        if app is None:
            return self._own.lend(name, keep_alive_s, use, load)
        _check(app, use, load)
        return ClusterLease(app, 0.0) if app.link.is_reachable else None

    async def acquire(
        self, name: str, keep_alive_s: float | None, use: Use, load: LoadSettings, *, is_resumed: bool = False
    ) -> Lease:
        """Waits for a replica, up to `WAIT_S`. Raises Unavailable, and BadRequest for what the app is not for."""
        app = self._find(split_adapters(name).model)
        if app is None:
            return await self._own.acquire(name, keep_alive_s, use, load, is_resumed=is_resumed)
        _check(app, use, load)
        began_s = time.monotonic()
        await app.link.reachable(WAIT_S)
        return ClusterLease(app, time.monotonic() - began_s)

    @property
    def n_wanting_room(self) -> int:
        return self._own.n_wanting_room

    def slots_of(self, name: str) -> int:
        """Of all replicas that this door has a link to."""
        app = self._app(name)
        return self._own.slots_of(name) if app is None else app.link.n_slots

    def streams_within(self, name: str, step_s: float) -> int:
        """One for each replica, beside others' requests."""
        app = self._app(name)
        return self._own.streams_within(name, step_s) if app is None else max(1, len(app.link.links()))

    async def would_evict(self, name: str) -> bool:
        return self._app(name) is None and await self._own.would_evict(name)

    def _app(self, name: str) -> App | None:
        try:
            return self._find(split_adapters(name).model)
        except LocalrunError:
            return None


def _check(app: App, use: Use, load: LoadSettings) -> None:
    if use is not app.use:
        raise BadRequest(
            f"the cluster runs '{app.model.name}' for {app.use}, not for {use}; deploy another model for that",
            field="model",
        )
    if load != NOTHING_ASKED:
        raise BadRequest(
            f"how '{app.model.name}' is loaded is the cluster's to say (`localrun cluster deploy`), not a request's; "
            f"leave out {', '.join(load.said)}",
            field="options",
        )


LOOK_AGAIN_S = 1.0
TAKE_AGAIN_S = 5.0

_log = logging.getLogger(__name__)


class Door:
    """See the module, and `runtime.Elsewhere`."""

    def __init__(self) -> None:
        member = settings.membership()
        self._token = settings.frames_token()
        self._tls = member.tls_to_connect()
        self._member = member
        self._books: Ledger | State | None = (
            None if member.is_head else Ledger(head_of(member), settings.books_folder())
        )
        self._shelf: Shelf | None = None
        self._files_at: tuple[str, ...] = ()  # where other nodes give files
        self._apps: dict[str, App] = {}  # by the model's name
        # Which this door cannot take, and why; without the description it tries again.
        self._refused: dict[str, tuple[Description | None, str]] = {}
        self._taking: set[str] = set()
        self.view = View(member.node, self._links, is_counted_here=member.is_head)
        self._watch = Watch(self._on_report)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def fetch(self) -> None:
        """Before the daemon: the cluster's keys. Raises Unavailable when the head does not give them."""
        if isinstance(self._books, Ledger):
            self._books.fetch()

    def books(self, own: OwnBooks) -> Books:
        """Those of the cluster: the head's own. Raises PortBusy."""
        if isinstance(self._books, Ledger):
            return self._books
        host, port = self._member.books
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise PortBusy(
                f"port {port} of {host}, at which other doors ask for keys and quotas, cannot be had "
                f"({error.strerror}); it is the one below --head-port"
            ) from None
        self._books = State(own, folders().state, self._token)
        return own

    def lender(self, own: Engines, store: Store) -> ClusterLender:
        self._shelf = Shelf(store)
        return ClusterLender(own, self.find)

    def start(self) -> None:
        self._watch.start()
        if isinstance(self._books, State):
            self._spawn(self._books.run(self._socket, self._member.tls_to_listen()))
            self._books.deploy_again()
        elif self._books is not None:
            self._books.start()

    async def stop(self) -> None:
        """What still runs on replicas is cancelled."""
        self._is_closed = True
        await self._watch.stop()
        if isinstance(self._books, Ledger):
            await self._books.stop()
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

    def _links(self, model: str) -> dict[str, EngineLink]:
        app = self._apps.get(model.removesuffix(":latest"))
        return {} if app is None else app.link.links()

    def _on_report(self, report: ClusterReport) -> None:
        self.view.told(report)
        others = (node.files_address for node in report.nodes if node.node != self._member.node)
        self._files_at = tuple(filter(None, others))
        told = {one.description.model.removesuffix(":latest"): one for one in report.apps}
        kept = {name.removesuffix(":latest") for name in (self._books.models if self._books is not None else ())}
        for name in set(self._apps) - set(told) - kept:  # a head that has come back deploys again
            self._leave(name)
        self._refused = {name: why for name, why in self._refused.items() if name in told}
        for name, one in told.items():
            app = self._apps.get(name)
            if app is not None and app.fingerprint == one.description.fingerprint:
                app.link.replicas(*_replicas(one))
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
        serve_app = said.app
        link = ClusterLink(
            model=model.name, hello=hello, tls=self._tls, on_step=lambda *_: None,
            choose=partial(self._watch.choose, serve_app), wake=lambda: self._watch.wake(serve_app),
        )  # fmt: skip
        link.replicas(*_replicas(told))
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


def _replicas(told: AppReport) -> tuple[dict[str, Address], dict[str, Told]]:
    """Of those that are ready."""
    ready = told.ready
    addresses = {one.id: Address(one.host, one.port, one.node) for one in ready}
    return addresses, {one.id: Told(one.work_tokens, one.recent) for one in ready}


async def _ended(link: ClusterLink) -> None:
    """When nothing runs on it any more."""
    while link.n_requests:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(LOOK_AGAIN_S)
    await link.stop()
