"""Fetching files: several at once, in parts, resumed where a former attempt ended, verified before they have a name.

Runs in the event loop of whoever calls it; the disk is touched in a few threads that end with the call. Whether it has
room is asked before the first byte is transferred. A part that fails for good ends its item and the others; what came
by then is recorded.

Invariants: the target appears complete and verified or not at all; bytes that are recorded are not asked for again,
unless the content on the server changed; the progress that is reported never decreases.

Does not: choose what to fetch, keep more than one fetch of a file apart by itself than through the lock beside it,
delete anything, or speak anything but HTTP.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx2

from localrun import __version__
from localrun.errors import DigestMismatch, DownloadFailed, LocalrunError, SourceChanged
from localrun.models.download import ranges
from localrun.models.download.journal import Header, Range, split
from localrun.models.download.partial import Partial, check_disk, failed, held, paths_of
from localrun.models.download.plan import FetchLimits, Item, NoProgress, Progress
from localrun.models.download.ranges import PassingFailure, RangeAnswer, RangeClient, answer_of, backoff_s, why_not

_N_DISK_THREADS = 4
_NO_PROGRESS = NoProgress()
_USUAL_LIMITS = FetchLimits()


def new_client(*, is_outward: bool = False) -> httpx2.AsyncClient:
    """A client for `fetch`: it goes through the proxies of the environment, and follows no redirect by itself;
    `is_outward`: it asks nobody who is not on the internet. Raises DownloadFailed for a proxy that no client can use.
    """
    ranges.prepare_proxies()
    return httpx2.AsyncClient(
        headers={"User-Agent": f"localrun/{__version__}"},
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32),
        follow_redirects=False,
        event_hooks={"request": [ranges.check_outward] if is_outward else []},
    )


async def first_bytes(
    item: Item, n_bytes: int, *, client: httpx2.AsyncClient, limits: FetchLimits = _USUAL_LIMITS
) -> bytes:
    """Up to `n_bytes` of the item's beginning; none if they cannot be had: `fetch` will tell why."""
    asked = Range(0, n_bytes if item.size_bytes is None else min(n_bytes, item.size_bytes))
    content = bytearray()
    if not asked.size_bytes:
        return b""
    with contextlib.suppress(TimeoutError, httpx2.HTTPError, PassingFailure, LocalrunError):
        async with asyncio.timeout(limits.stall_s):
            response = await RangeClient(item, client, limits).get(asked, "")
            try:
                read_answer(response, asked, item)
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) >= asked.size_bytes:
                        break
            finally:
                await response.aclose()
    return bytes(content[: asked.size_bytes])


async def fetch(
    items: Sequence[Item],
    *,
    client: httpx2.AsyncClient,
    limits: FetchLimits = _USUAL_LIMITS,
    progress: Progress = _NO_PROGRESS,
    source: Callable[[Item], RangeClient] | None = None,
) -> None:
    """Returns when every item is at its target, verified. `source` is asked for the ranges of an item, instead of its
    own address.

    What is there already is not transferred again: a finished target, and the finished parts of an unfinished one. An
    item that another process is fetching is waited for. Of items with the same target the first counts. Cancelling the
    task stops the transfers and keeps the parts.

    Raises DiskFull (before anything is transferred, if it can be told), DigestMismatch, SourceChanged, SourceRefused,
    and DownloadFailed for the rest (no connection after all retries). Other items' finished parts are kept.
    """
    by_target: dict[str, Item] = {}
    for item in items:
        by_target.setdefault(str(item.target), item)
    executor = concurrent.futures.ThreadPoolExecutor(_N_DISK_THREADS, thread_name_prefix="localrun-download")
    try:
        await asyncio.get_running_loop().run_in_executor(
            executor, lambda: check_disk(by_target.values(), reserve_bytes=limits.reserve_bytes)
        )
        source = source or (lambda item: RangeClient(item, client, limits))
        shared = Shared(client, limits, Throttle(limits), executor, progress, source)
        await all_or_first_error(Transfer(item, shared).run() for item in by_target.values())
    finally:
        executor.shutdown(wait=False)


async def all_or_first_error(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Returns when all are done. The first exception cancels the others and is raised, as itself and not in a group."""
    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
    if first is not None:
        raise first


class RateLimit:
    """Shared by all connections of a fetch. Time is given by the caller, in seconds of any one clock.

    Bytes are paid for after they came, so the first are not held up; idle time is not saved up for a burst.
    """

    def __init__(self, rate_bytes_per_s: int) -> None:
        if rate_bytes_per_s < 1:
            raise ValueError("the rate must be at least 1 byte per second")
        self._rate_bytes_per_s = rate_bytes_per_s
        self._paid_until_s = float("-inf")

    def pay(self, n_bytes: int, now_s: float) -> float:
        """The seconds to wait before reading on, `n_bytes` having been read."""
        self._paid_until_s = max(self._paid_until_s, now_s) + n_bytes / self._rate_bytes_per_s
        return self._paid_until_s - now_s


_KEPT = "what was transferred is kept, pull again to go on"


class Throttle:
    def __init__(self, limits: FetchLimits) -> None:
        self.connections = asyncio.Semaphore(limits.connections)
        self._limits = limits
        self._rate = None if limits.rate_bytes_per_s is None else RateLimit(limits.rate_bytes_per_s)
        self._rest_until_s = float("-inf")

    async def rest(self) -> None:
        """Waits as long as a server wanted rest. To be called before each request."""
        if (wait_s := self._rest_until_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)

    async def received(self, n_bytes: int) -> None:
        """Waits as the bandwidth limit demands after `n_bytes` came."""
        if self._rate is not None and (wait_s := self._rate.pay(n_bytes, time.monotonic())) > 0:
            await asyncio.sleep(wait_s)

    async def failed(self, n_failures: int, failure: PassingFailure, name: str) -> None:
        """Waits after the n-th failure in a row. What a server asked for holds for every connection.

        Raises DownloadFailed when it is not worth waiting for: after too many failures, or for too long.
        """
        limits, wanted_s = self._limits, failure.wait_s
        if n_failures > limits.retries:
            raise DownloadFailed(f"{name}: {failure}, {n_failures} times in a row; {_KEPT}") from failure
        if wanted_s is not None and wanted_s > limits.longest_wait_s:
            raise DownloadFailed(
                f"{name}: {failure} and asks to wait {wanted_s:.0f} s, longer than the {limits.longest_wait_s:.0f} s "
                f"that a download waits; {_KEPT}"
            ) from failure
        if wanted_s is not None:
            self._rest_until_s = max(self._rest_until_s, time.monotonic() + wanted_s)
        draw = random.random()
        await asyncio.sleep(backoff_s(n_failures, base_s=limits.backoff_base_s, cap_s=limits.backoff_cap_s, draw=draw))
        await self.rest()


_T = TypeVar("_T")


class Shared(NamedTuple):
    client: httpx2.AsyncClient
    limits: FetchLimits
    throttle: Throttle
    executor: Executor
    progress: Progress
    source: Callable[[Item], RangeClient]

    async def in_thread(self, work: Callable[[], _T], stop: threading.Event | None = None) -> _T:
        """Waits for the work even when cancelled (`stop` is set then): no file is closed under a thread that writes."""
        future = asyncio.get_running_loop().run_in_executor(self.executor, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if stop is not None:
                stop.set()
            await asyncio.wait([future])
            raise


_CHUNK_BYTES = 1024 * 1024


class Stopped(Exception):
    """The caller does not want the digest any more."""


def digest_of(path: Path, item: Item, stop: threading.Event) -> str:
    """Hex digits of the kind that the item has: of sha256, or git's id of a blob with this content (sha1 over "blob
    <size>", NUL, content). Raises OSError, and Stopped soon after `stop` is set."""
    digest = hashlib.sha256()
    if not item.sha256:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            if stop.is_set():
                raise Stopped
            digest.update(chunk)
    return digest.hexdigest()


class ContentChanged(Exception):
    """The server has another content now, called `validator`: what came so far is worthless."""

    def __init__(self, validator: str) -> None:
        super().__init__(validator)
        self.validator = validator


class PartDownloads:
    """`report` is told how many bytes are there."""

    def __init__(
        self, item: Item, partial: Partial, ranges: RangeClient, shared: Shared, *, report: Callable[[int], None]
    ) -> None:
        self._item = item
        self._partial = partial
        self._ranges = ranges
        self._shared = shared
        self._report = report
        # Where a digest says what the content must be, it decides: some storages have an ETag for each of their
        # machines, and what came must not be thrown away for that.
        self._heeds_validator = not (item.sha256 or item.git_sha1)
        # The part that receives the whole file, since the server cannot do ranges; the others leave it to that one.
        self._whole: Range | None = None
        self._n_buffered_bytes = 0

    async def run(self) -> None:
        """Raises ContentChanged, and what `fetch` does."""
        self._advance()
        parts = split(self._partial.missing(), self._shared.limits.part_bytes)
        if not self._shared.limits.is_in_order:
            random.shuffle(parts)
        await all_or_first_error([self._fill_part(part) for part in parts])
        await self._shared.in_thread(self._partial.sync)

    async def _fill_part(self, part: Range) -> None:
        limits, throttle = self._shared.limits, self._shared.throttle
        n_failures = 0
        async with throttle.connections:
            while (wanted := self._wanted(part)) is not None:
                await throttle.rest()
                n_left_bytes = self._n_left_bytes(part)
                try:
                    await self._receive(part, wanted)
                    failure = PassingFailure(f"{self._ranges.host} ended the answer early")
                except PassingFailure as passing:
                    failure = passing
                except httpx2.TransportError as error:
                    failure = PassingFailure(f"{self._ranges.host}: {why_not(error)}")
                if self._wanted(part) is None:
                    return
                has_progress = n_left_bytes - self._n_left_bytes(part) >= limits.progress_bytes
                n_failures = 1 if has_progress else n_failures + 1
                await throttle.failed(n_failures, failure, self._item.name)

    def _wanted(self, part: Range) -> Range | None:
        """What to ask for next on behalf of a part."""
        missing = self._left(part)
        return missing[0] if missing else None

    def _left(self, part: Range) -> list[Range]:
        """What is missing of a part: all of the file for the one that receives all, nothing for the others then."""
        if self._whole is not None and self._whole != part:
            return []
        return self._partial.missing(None if self._whole == part else part)

    def _n_left_bytes(self, part: Range) -> int:
        return sum(gap.size_bytes for gap in self._left(part))

    async def _receive(self, part: Range, wanted: Range) -> None:
        """One request. Returns when the wanted range came, or when the body ended (perhaps too early)."""
        validator = self._partial.header.validator if self._heeds_validator else ""
        response = await self._ranges.get(wanted, validator)
        try:
            found = read_answer(response, wanted, self._item)
            self._check(found)
            if not self._partial.header.validator:
                await self._shared.in_thread(lambda: self._partial.learn_validator(found.validator))
            until = wanted.end
            if response.status_code == 200 and wanted != Range(0, self._partial.header.size_bytes):
                if self._whole is None:
                    self._whole = part
                if self._whole != part:
                    return
                until = self._partial.header.size_bytes
            await self._receive_body(response, Range(found.start, until))
        finally:
            await response.aclose()

    def _check(self, found: RangeAnswer) -> None:
        """Raises SourceChanged for another size, ContentChanged for another validator if it is heeded."""
        header = self._partial.header
        if found.total_bytes not in (None, header.size_bytes):
            raise SourceChanged(
                f"{self._item.name} has {found.total_bytes} bytes on {self._ranges.host} instead of "
                f"{header.size_bytes}; pull again to get the new version"
            )
        if found.validator and header.validator not in ("", found.validator):
            if self._heeds_validator:
                raise ContentChanged(found.validator)
            self._partial.is_doubtful = True

    async def _receive_body(self, response: httpx2.Response, within: Range) -> None:
        """Writes what is missing of `within`, in pieces of `record_bytes`; what came before a failure is kept."""
        position = within.start
        # Then the connection can serve the next part; a body without a length is not read to its end, if it has one.
        is_exact = response.headers.get("content-length") == str(within.size_bytes)
        piece_start, piece = position, bytearray()
        try:
            async for chunk in response.aiter_raw():
                for gap in self._partial.missing(Range(position, min(position + len(chunk), within.end))):
                    if piece and piece_start + len(piece) != gap.start:
                        stored, piece = piece, bytearray()
                        await self._store(piece_start, stored)
                    if not piece:
                        piece_start = gap.start
                    piece += chunk[gap.start - position : gap.end - position]
                    self._n_buffered_bytes += gap.size_bytes
                position += len(chunk)
                self._advance()
                if len(piece) >= self._shared.limits.record_bytes:
                    stored, piece = piece, bytearray()
                    await self._store(piece_start, stored)
                await self._shared.throttle.received(len(chunk))
                if position >= within.end and not is_exact:
                    return
        finally:
            if piece:
                await self._store(piece_start, piece)

    async def _store(self, start: int, piece: bytearray) -> None:
        """Even when cancelled meanwhile: what was written and recorded is no longer missing."""
        future = asyncio.get_running_loop().run_in_executor(
            self._shared.executor, lambda: self._partial.write(start, bytes(piece))
        )
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
        finally:
            self._n_buffered_bytes -= len(piece)
            if future.done() and not future.cancelled() and future.exception() is None:
                self._partial.add(future.result())

    def _advance(self) -> None:
        self._report(self._partial.n_bytes + self._n_buffered_bytes)


def read_answer(response: httpx2.Response, asked: Range, item: Item) -> RangeAnswer:
    """As `answer_of`, of an answer whose headers have come."""
    host, now = response.url.host, datetime.now(UTC)
    return answer_of(response.status_code, response.headers, asked, name=item.name, host=host, now=now)


# How often a download may begin anew, because the content on the server changed or what was resumed proved wrong.
_MAX_STARTS = 3


class Transfer:
    def __init__(self, item: Item, shared: Shared) -> None:
        self._item = item
        self._shared = shared
        self._size_bytes = item.size_bytes
        self._ranges = shared.source(item)
        self._partial: Partial | None = None
        self._n_reported_bytes = -1

    async def run(self) -> None:
        """Returns when the item is at its target. Raises what `fetch` does."""
        try:
            await self._run()
        except OSError as error:  # of the disk: those of the network are httpx2's
            raise failed(self._item.target, error) from error

    async def _run(self) -> None:
        paths = paths_of(self._item.target)
        if self._is_there() and not paths.journal.exists():
            return
        lock_path = self._item.lock_path
        async with held(lock_path or paths.lock, is_kept=lock_path is not None):
            # Whoever held the lock may have fetched it.
            if not self._is_there():
                await self._fetch()
            else:
                # A process was killed between the renaming and this.
                paths.partial.unlink(missing_ok=True)
                paths.journal.unlink(missing_ok=True)

    def _is_there(self) -> bool:
        try:
            size_bytes = self._item.target.stat().st_size
        except OSError:
            return False
        if self._size_bytes not in (None, size_bytes):
            return False
        self._report(size_bytes)
        return True

    async def _fetch(self) -> None:
        if self._size_bytes is None:
            self._size_bytes = await self._ask_size()
        try:
            await self._shared.in_thread(self._open)
            await self._fill_and_publish()
        finally:
            if self._partial is not None:
                await self._shared.in_thread(self._leave)

    async def _fill_and_publish(self) -> None:
        for _ in range(_MAX_STARTS):
            try:
                await PartDownloads(self._item, self._opened(), self._ranges, self._shared, report=self._report).run()
            except ContentChanged as changed:
                await self._begin_anew(changed.validator)
                continue
            if await self._verified():
                await self._shared.in_thread(self._opened().publish)
                return
        await self._shared.in_thread(self._opened().discard)
        raise SourceChanged(f"{self._item.name} keeps changing on {self._ranges.host}; pull again later")

    def _leave(self) -> None:
        partial = self._opened()
        if not partial.n_bytes and paths_of(self._item.target).partial.exists():
            # Room reserved for a file that never began to come, or is forbidden.
            partial.discard()
        partial.close()

    async def _begin_anew(self, validator: str) -> None:
        partial = self._opened()
        await self._shared.in_thread(lambda: partial.restart(validator))

    def _open(self) -> None:
        """In a thread, so it is kept here at once: a cancelled task would not get what is returned."""
        item = self._item
        header = Header(size_bytes=self._size_bytes or 0, sha256=item.sha256 or "", git_sha1=item.git_sha1 or "")
        self._partial = Partial.open(item.target, header, sync_bytes=self._shared.limits.sync_bytes)

    async def _verified(self) -> bool:
        """Whether the file is what was promised. False: it is not, perhaps because it is of two contents; begin anew.

        Raises DigestMismatch.
        """
        partial, item = self._opened(), self._item
        expected = item.sha256 or item.git_sha1
        if not expected:
            return True
        self._shared.progress.verifying(item)
        stop = threading.Event()
        found = await self._shared.in_thread(lambda: digest_of(paths_of(item.target).partial, item, stop), stop)
        if found == expected:
            return True
        if partial.is_doubtful:
            partial.is_doubtful = False
            await self._begin_anew("")
            return False
        await self._shared.in_thread(partial.discard)
        kind = "sha256" if item.sha256 else "git blob id"
        raise DigestMismatch(
            f"{item.name} from {self._ranges.host} has the {kind} {found} instead of {expected}; it was deleted. Pull "
            f"again; if that fails too, the file is damaged at its source"
        )

    async def _ask_size(self) -> int:
        """The size that the server says, in an answer to a request for the first byte."""
        n_failures = 0
        while True:
            n_failures += 1
            try:
                async with self._shared.throttle.connections:
                    await self._shared.throttle.rest()
                    response = await self._ranges.get(Range(0, 1), "")
                    await response.aclose()
                found = read_answer(response, Range(0, 1), self._item)
            except PassingFailure as passing:
                failure = passing
            except httpx2.TransportError as error:
                failure = PassingFailure(f"{self._ranges.host}: {why_not(error)}")
            else:
                if found.total_bytes is None:
                    raise DownloadFailed(f"{self._ranges.host} does not say how large {self._item.name} is")
                return found.total_bytes
            await self._shared.throttle.failed(n_failures, failure, self._item.name)

    def _report(self, n_bytes: int) -> None:
        if n_bytes > self._n_reported_bytes:
            self._n_reported_bytes = n_bytes
            self._shared.progress.advanced(self._item, n_bytes)

    def _opened(self) -> Partial:
        assert self._partial is not None
        return self._partial
