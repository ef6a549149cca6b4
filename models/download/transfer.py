"""One item on its way: locked, opened where a former attempt ended, filled by parts, verified, published.

Owned by the event loop of its fetch; the disk is touched in the fetch's threads only.

Invariants: the target appears complete and verified or not at all; bytes that are recorded are not asked for again,
unless the content on the server changed; the progress that is reported never decreases.

Does not: check the room on the disk of all items together (`disk`).
"""

from __future__ import annotations

import threading

import httpx2

from localrun.errors import DigestMismatch, DownloadFailed, SourceChanged
from localrun.models.download import digest, lock
from localrun.models.download.answer import PassingFailure
from localrun.models.download.filling import ContentChanged, Filling, read_answer
from localrun.models.download.item import Item
from localrun.models.download.journal import Header
from localrun.models.download.link import Link
from localrun.models.download.partial import Partial, failed, paths_of
from localrun.models.download.ranges import Range
from localrun.models.download.shared import Shared

# How often a download may begin anew, because the content on the server changed or what was resumed proved wrong.
_MAX_STARTS = 3


class Transfer:
    def __init__(self, item: Item, shared: Shared) -> None:
        self._item = item
        self._shared = shared
        self._size_bytes = item.size_bytes
        self._link = Link(item, shared.client, shared.limits)
        self._partial: Partial | None = None
        self._n_reported_bytes = -1

    async def run(self) -> None:
        """Returns when the item is at its target. Raises what `fetch` does."""
        try:
            await self._run()
        except OSError as error:
            raise failed(self._item.target, error) from error

    async def _run(self) -> None:
        paths = paths_of(self._item.target)
        if self._is_there() and not paths.journal.exists():
            return
        lock_path = self._item.lock_path
        async with lock.held(lock_path or paths.lock, is_kept=lock_path is not None):
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
                await self._fill()
            except ContentChanged as changed:
                await self._begin_anew(changed.validator)
                continue
            if await self._verified():
                await self._shared.in_thread(self._opened().publish)
                return
        await self._shared.in_thread(self._opened().discard)
        raise SourceChanged(f"{self._item.name} keeps changing on {self._link.host}; pull again later")

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

    async def _fill(self) -> None:
        await Filling(self._item, self._opened(), self._link, self._shared, report=self._report).run()

    async def _verified(self) -> bool:
        """Whether the file is what was promised. False: it is not, perhaps because it is of two contents; begin anew.

        Raises DigestMismatch.
        """
        partial, item = self._opened(), self._item
        expected = item.sha256 or item.git_sha1
        if not expected:
            return True
        self._shared.progress.verifying(item)
        compute = digest.sha256 if item.sha256 else digest.git_sha1
        stop = threading.Event()
        try:
            found = await self._shared.in_thread(lambda: compute(paths_of(item.target).partial, stop), stop)
        except OSError as error:
            raise failed(item.target, error) from error
        if found == expected.lower():
            return True
        if partial.is_doubtful:
            partial.is_doubtful = False
            await self._begin_anew("")
            return False
        await self._shared.in_thread(partial.discard)
        kind = "sha256" if item.sha256 else "git blob id"
        raise DigestMismatch(
            f"{item.name} from {self._link.host} has the {kind} {found} instead of {expected}; it was deleted. Pull "
            f"again; if that fails too, the file is damaged at its source"
        )

    async def _ask_size(self) -> int:
        """The size that the server says, in an answer to a request for the first byte."""
        n_failures = 0
        while True:
            n_failures += 1
            try:
                async with self._shared.pace.connections:
                    await self._shared.pace.rest()
                    response = await self._link.get(Range(0, 1), "")
                    await response.aclose()
                found = read_answer(response, Range(0, 1), self._item)
            except PassingFailure as passing:
                failure = passing
            except httpx2.TransportError as error:
                failure = PassingFailure(f"{self._link.host}: {str(error) or type(error).__name__}")
            else:
                if found.total_bytes is None:
                    raise DownloadFailed(f"{self._link.host} does not say how large {self._item.name} is")
                return found.total_bytes
            await self._shared.pace.failed(n_failures, failure, self._item.name)

    def _report(self, n_bytes: int) -> None:
        if n_bytes > self._n_reported_bytes:
            self._n_reported_bytes = n_bytes
            self._shared.progress.advanced(self._item, n_bytes)

    def _opened(self) -> Partial:
        assert self._partial is not None
        return self._partial
