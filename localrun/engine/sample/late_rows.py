"""Samples rows, those with a slow grammar beside the steps instead of inside one.

Such a row is copied and sampled in a thread. Its request keeps its cells and takes no part in steps until its token is
there; the others go on.

Owner: the engine's main thread; a request's sampler belongs to the thread until `settle` or `finish` gives it back.
Does not: decide what is slow (`constraint.py`), or what follows from a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from localrun.engine.backend import Backend
from localrun.engine.request import Request

# One that takes seconds must not keep another from its turn for long.
_THREADS = 2
# How long to sleep when all that run are late; a cancel may come in the meantime.
_WAIT_S = 0.005


class Sampled(NamedTuple):
    """The token of a request, from `row` of the last decode; the row is None if that is over."""

    request: Request
    row: int | None
    token: int


class LateRows:
    """See the module."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._threads: ThreadPoolExecutor | None = None
        self._late: dict[Request, Future[int]] = {}

    def sample(self, rows: Sequence[tuple[Request, int]]) -> list[Sampled]:
        """The tokens of these requests, but for those that are late from now on."""
        now = [(request, row) for request, row in rows if not _is_slow(request)]
        for request, row in rows:
            if _is_slow(request):
                self._threads = self._threads or ThreadPoolExecutor(_THREADS, "late")
                self._late[request] = self._threads.submit(request.sampler.hold(row))
                request.is_late = True
        tokens = self._backend.sample([(request.sampler, row) for request, row in now])
        return [Sampled(request, row, token) for (request, row), token in zip(now, tokens, strict=True)]

    def settle(self) -> list[Sampled]:
        """The tokens that are there now."""
        return [
            Sampled(request, None, self.finish(request)) for request, token in list(self._late.items()) if token.done()
        ]

    def finish(self, request: Request) -> int:
        """The token of a late request, waited for if need be."""
        request.is_late = False
        return self._late.pop(request).result()

    def wait(self) -> None:
        """Sleep a little, or until the first of them is there; not at all when nobody is late."""
        if self._late:
            wait(self._late.values(), _WAIT_S, FIRST_COMPLETED)

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()


def _is_slow(request: Request) -> bool:
    # The log-probabilities of a token are read from its row, which must still be there then.
    return request.constraint is not None and request.constraint.is_slow and request.n_probs is None
