"""Adapters that requests name: loaded beside the steps, kept for the next requests, freed when there are too many.

A request waits in the queue until all of its adapters are loaded, and others pass it. One that cannot be loaded ends
the requests that wait for it, and no others. The engine's own adapters are loaded before it starts, and stay.

Owner: the engine's main thread; a thread loads and frees.
Invariant: an adapter that a request needs stays loaded until that request is over.
Does not: read files (`native/adapters.py`), or end a request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from localrun.engine.backend import AdapterSet, Backend
from localrun.engine.request import Request
from localrun.errors import BadRequest, EngineFailed, LocalrunError
from localrun.wire import Adapter

log = logging.getLogger("localrun.engine")

Loader = Executor
MOST_LOADED = 8


class AdapterQueue:
    """See the module. `own` are loaded already. The `loader` does one thing after another, or everything at once, and
    what it has done `ring`s."""

    def __init__(
        self, backend: Backend, own: AdapterSet, ring: Callable[[], None], loader: Loader | None = None
    ) -> None:
        self._ring = ring
        self._backend = backend
        self._own = {adapter.digest for adapter in own.adapters}
        self._loader = loader or ThreadPoolExecutor(1, "adapters")
        self._loaded: dict[bytes, None] = {}  # besides the own ones, the least recently used first
        self._users: Counter[bytes] = Counter()
        self.waiting: list[Request] = []
        self.loading: tuple[Adapter, Future[None]] | None = None
        self._lacks_room = False

    def add(self, request: Request) -> None:
        """A new request that has adapters. It waits unless all of them are loaded."""
        # While a waiting request lacks room, later ones queue behind it even if their own adapters are loaded:
        # otherwise they could keep that room occupied for ever.
        if self._lacks_room or next(self._missing(request), None) is not None:
            request.awaits_adapters = True
            self.waiting.append(request)
        else:
            self._hold(request)

    def collect(self) -> Iterator[tuple[Request, LocalrunError]]:
        """Take what was loaded, and load what is waited for. Returns the requests that can never start, with the
        reason."""
        yield from self._take_loaded()
        self._lacks_room = False
        n_most = MOST_LOADED - len(self._own)
        for request in list(self.waiting):
            missing = next(self._missing(request), None)
            if missing is None:
                self.waiting.remove(request)
                request.awaits_adapters = False
                self._hold(request)
            elif self._n_needed(request) > n_most:
                self.waiting.remove(request)
                yield request, self._too_many(request)
            elif self.loading is None and not self._begin(missing, request):
                self._lacks_room = True
                break

    def drop(self, request: Request) -> None:
        """A request that has adapters is over."""
        if request.awaits_adapters:
            if request in self.waiting:
                self.waiting.remove(request)
            return
        for adapter in request.adapters.adapters:
            if adapter.digest in self._loaded:
                self._users[adapter.digest] -= 1

    def close(self) -> None:
        """End the thread after what it is doing."""
        self._loader.shutdown()

    def _missing(self, request: Request) -> Iterator[Adapter]:
        known = (self._loaded, self._own)
        return (adapter for adapter in request.adapters.adapters if not any(adapter.digest in some for some in known))

    def _too_many(self, request: Request) -> BadRequest:
        has = f"the model has {len(self._own)} of its own (ADAPTER), which stay loaded" if self._own else ""
        text = f"the request needs {self._n_needed(request)} adapters" + (f" and {has}" if has else "")
        way_out = "use fewer, or a model with fewer of its own" if has else "use fewer"
        return BadRequest(f"{text}; an engine has at most {MOST_LOADED} loaded at once; {way_out}", field="adapters")

    def _n_needed(self, request: Request) -> int:
        return sum(adapter.digest not in self._own for adapter in request.adapters.adapters)

    def _hold(self, request: Request) -> None:
        for adapter in request.adapters.adapters:
            if adapter.digest in self._loaded:
                self._users[adapter.digest] += 1
                self._loaded[adapter.digest] = self._loaded.pop(adapter.digest)

    def _begin(self, adapter: Adapter, request: Request) -> bool:
        """Load an adapter that a request waits for, in the place of another if there are too many. False if all are
        needed now."""
        needed = {other.digest for other in request.adapters.adapters}
        freed: bytes | None = None
        if len(self._loaded) + len(self._own) >= MOST_LOADED:
            unused = (digest for digest in self._loaded if not self._users[digest] and digest not in needed)
            freed = next((digest for digest in unused if self._backend.leave_adapter(digest)), None)
            if freed is None:
                return False
            del self._loaded[freed], self._users[freed]
        self.loading = adapter, self._loader.submit(self._load, adapter, freed)
        self.loading[1].add_done_callback(lambda _: self._ring())
        return True

    def _load(self, adapter: Adapter, freed: bytes | None) -> None:
        """Loader thread."""
        if freed is not None:
            self._backend.free_adapter(freed)
        self._backend.load_adapter(adapter)

    def _take_loaded(self) -> Iterator[tuple[Request, LocalrunError]]:
        if self.loading is None or not self.loading[1].done():
            return
        (adapter, future), self.loading = self.loading, None
        error = future.exception()
        if error is None:
            self._loaded[adapter.digest] = None
            return
        if not isinstance(error, LocalrunError):
            log.error("the adapter %s cannot be loaded", adapter.path, exc_info=error)
            error = EngineFailed(f"the adapter {adapter.path} cannot be loaded: {error!r}")
        for request in list(self.waiting):
            if any(other.digest == adapter.digest for other in request.adapters.adapters):
                self.waiting.remove(request)
                yield request, error
