"""Who gives jobs their engine in a door: the cluster for its own apps, the machine's supervisor for every other model.

A lease of an app is only a permission, since the replica is chosen with the prompt (`link.py`): it takes nothing and
holds nothing. Whether a stream may go on elsewhere is decided by the app's fingerprint, not by files.

Runs in the door's event loop. Does not: place replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from localrun import wire
from localrun.cluster.link import ClusterLink
from localrun.config import NOTHING_ASKED, LoadSettings
from localrun.errors import BadRequest, LocalrunError
from localrun.models.adapters import AdaptedModel
from localrun.models.name import split_adapters
from localrun.models.storage.model import Model
from localrun.server.engines.resident import Engines, Lease, Use

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
    """See the module. `find` knows the cluster's apps by the names of their models."""

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
