"""Rows of pictures and sound: made beside the steps, one chunk at a time, and kept for those who need them again.

A running request whose next rows are those of a chunk sits out until they are there. Requests that need the same chunk
wait for one encoding. It computes while streams need no step, as the background does (`engine.py`).

Owner: the engine's main thread; the work is in the projector's. Time is passed in.
Invariant: kept rows take at most `limit_bytes`, and what running requests are about to compute.
Does not: end a request, or know which rows are in cells (`cache.py`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from localrun.engine.backend import DecodeFailed, Encoding, Projector
from localrun.engine.sample.text import MediaSpan
from localrun.errors import EngineFailed, LocalrunError
from localrun.wire import MediaCounts, MediaKind

log = logging.getLogger("localrun.engine")

# Of the memory for prefixes, a part is for encoded pictures and sound if the model takes any: one in so many bytes.
ENCODED_PART = 4

R = TypeVar("R")


@dataclass
class _Job(Generic[R]):
    """An encoding under way, for the request that asked for it first; None if that one left, and others may need it."""

    span: MediaSpan
    encoding: Encoding
    began_at_s: float
    request: R | None
    is_halted: bool = False


class Encodings(Generic[R]):
    """See the module, for requests of whatever kind. Without a projector nothing is ever wanted. `on_encoded` hears of
    every chunk's rows, and of the seconds that they took with pauses."""

    def __init__(
        self,
        projector: Projector | None,
        limit_bytes: int,
        clock: Callable[[], float],
        on_encoded: Callable[[int, float], None] = lambda _n_rows, _seconds: None,
    ) -> None:
        self._projector = projector
        self._on_encoded = on_encoded
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._kept: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()  # used longest ago first
        self._kept_bytes = 0
        self._unused: set[bytes] = set()  # nobody has computed with them yet
        self._wanted: dict[bytes, list[R]] = {}
        self.is_busy = False  # a chunk is being encoded
        self._job: _Job[R] | None = None
        self._failed: list[tuple[R, LocalrunError]] = []
        self._n_encoded = self._n_reused = self._n_tokens = 0
        self._encode_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether an encoding can be collected."""
        return self._job is not None and self._job.encoding.is_over

    @property
    def counts(self) -> MediaCounts:
        """Since the start."""
        return MediaCounts(self._n_encoded, self._n_reused, self._n_tokens, self._encode_s, self._kept_bytes)

    def has(self, span: MediaSpan) -> bool:
        """Whether the rows of a chunk are there."""
        return span.key in self._kept

    def rows(self, span: MediaSpan) -> NDArray[np.float32] | None:
        """The rows of a chunk; None if they are not there."""
        rows = self._kept.get(span.key)
        if rows is not None:
            self._kept.move_to_end(span.key)
        return rows

    def want(self, wanted: Sequence[tuple[R, MediaSpan]]) -> None:
        """Running requests, each with a chunk that it needs next; nothing else is needed. Begins to encode the first
        one that is not there."""
        if not (wanted or self._wanted):
            return
        self._wanted = {}
        for request, span in wanted:
            requests = self._wanted.setdefault(span.key, [])
            if request not in requests:
                requests.append(request)
        self._trim()
        if self._job is None:
            for request, span in wanted:
                if span.key not in self._kept and all(failed is not request for failed, _ in self._failed):
                    self._begin(request, span)
                    return

    def collect(self) -> list[tuple[R, LocalrunError]]:
        """Take what is over. Returns the requests whose media cannot be encoded, and why."""
        if self._job is not None and self._job.encoding.is_over:
            job, self._job, self.is_busy = self._job, None, False
            if not job.is_halted:
                self._take(job)
        failed, self._failed = self._failed, []
        return failed

    def computed(self, span: MediaSpan, n_rows: int, *, is_last: bool) -> None:
        """Rows of a chunk are in cells now, the last of it with `is_last`."""
        self._n_tokens += n_rows
        if is_last and span.key in self._unused:
            self._unused.remove(span.key)
        elif is_last:
            self._n_reused += 1

    def drop(self, request: R) -> None:
        """A request is over. What is encoded for nobody else is given up."""
        self._failed = [failed for failed in self._failed if failed[0] is not request]
        for requests in self._wanted.values():
            if request in requests:
                requests.remove(request)
        job = self._job
        if job is None or job.is_halted:
            return
        if job.request is request:
            job.request = None
        if job.request is None and not self._wanted.get(job.span.key):
            self._halt(job)

    def clear(self) -> None:
        """Forget all rows but those that somebody is about to compute."""
        self._trim(0)

    def close(self) -> None:
        """Give up what is under way."""
        if self._job is not None and not self._job.is_halted:
            self._halt(self._job)

    def _halt(self, job: _Job[R]) -> None:
        job.is_halted = True
        job.encoding.halt()

    def _begin(self, request: R, span: MediaSpan) -> None:
        assert self._projector is not None
        try:
            encoding = self._projector.begin(span.chunk)
        except Exception as error:
            self._failed.append((request, _problem(span, error)))
            return
        self._job, self.is_busy = _Job(span, encoding, self._clock(), request), True

    def _take(self, job: _Job[R]) -> None:
        try:
            rows = job.encoding.result()
            if len(rows) != job.span.chunk.n_tokens:
                raise DecodeFailed(f"{len(rows)} rows instead of {job.span.chunk.n_tokens}", is_fatal=False)
        except Exception as error:
            if job.request is not None:  # else whoever needs it tries for itself, with its own file
                self._failed.append((job.request, _problem(job.span, error)))
            return
        self._n_encoded += 1
        took_s = self._clock() - job.began_at_s
        self._encode_s += took_s
        self._on_encoded(len(rows), took_s)
        key = job.span.key
        self._kept[key] = rows
        self._kept_bytes += rows.nbytes
        self._unused.add(key)
        self._trim()

    def _trim(self, limit_bytes: int | None = None) -> None:
        """Forget the rows used longest ago until the others fit."""
        limit_bytes = self._limit_bytes if limit_bytes is None else limit_bytes
        for key in [key for key in self._kept if not self._wanted.get(key)]:
            if self._kept_bytes <= limit_bytes:
                return
            self._kept_bytes -= self._kept.pop(key).nbytes
            self._unused.discard(key)


def _problem(span: MediaSpan, error: Exception) -> LocalrunError:
    """What a request hears whose chunk cannot be encoded."""
    where = f"{span.field}: " if span.field else ""
    if isinstance(error, LocalrunError):
        error.message = where + error.message
        return error
    kind = "picture" if span.chunk.media.kind is MediaKind.IMAGE else "recording"
    log.error("a %s cannot be encoded: %s", kind, error)
    return EngineFailed(f"{where}a {kind} of the prompt cannot be encoded: {error}")
