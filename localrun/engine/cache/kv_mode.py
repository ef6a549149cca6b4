"""Which pool is in force, and when another one is needed.

Owner: the engine's main thread. Split KV is the better one for several streams, but gives each request only its share
of the cells. A request that outgrows its share gets one pool for all, in which it may have nearly everything; split
comes back when there is none such any more, and nothing runs, or for some time. Changing takes a new native context:
the engine takes all requests off first, and what they had computed waits in the store, as far as that has room.

Does not: take requests off (`engine.py`), or know what runs.
"""

from __future__ import annotations

from collections.abc import Callable

from localrun.engine.backend import Backend
from localrun.engine.cache.kv_pool import KvPool
from localrun.engine.cache.kv_store import KvStore
from localrun.engine.cache.pool import Pool
from localrun.engine.cache.state_keeper import StateKeeper
from localrun.engine.cache.state_pool import StatePool
from localrun.engine.cache.stream_pool import StreamPool

# A change costs everybody about as much as ten decode steps; requests that need it rarely come alone.
LINGER_S = 10.0


class KvMode:
    """See the module. `pool` is the one in force."""

    pool: Pool

    def __init__(
        self, backend: Backend, store: KvStore, clock: Callable[[], float], takes: Callable[[int], bool]
    ) -> None:
        self._backend = backend
        self._store = store
        self._clock = clock
        self._takes = takes
        self._keeper = StateKeeper(backend, store, clock)
        self._is_needed_until_s = 0.0
        self._open()

    def change(self, n_longest: int, *, is_running: bool, now_s: float) -> bool | None:
        """Whether KV should be split from now on, for requests of up to `n_longest` tokens; None to leave it so."""
        if not self._backend.can_split:
            return None
        if n_longest >= self._share:
            self._is_needed_until_s = now_s + LINGER_S
            return False if self._backend.is_split else None
        is_due = not is_running or now_s >= self._is_needed_until_s
        return True if is_due and not self._backend.is_split else None

    def switch(self, *, split: bool) -> None:
        """Change. Nothing may run."""
        self.pool.retire()
        self._backend.rebuild(split=split)
        self._open()

    def _open(self) -> None:
        if not self._backend.cuts_states:
            self.pool = StatePool(self._backend, self._store, self._clock)
        elif self._backend.is_split:
            self.pool = StreamPool(self._backend, self._keeper, self._takes)
            self._share = self.pool.cells.n_cells
        else:
            self.pool = KvPool(self._backend, self._keeper)
