"""Filling what is missing of a partial file, by parts that are received at once.

Owned by the event loop of the fetch. One filling lasts until nothing is missing, or until the first part fails for
good; what came by then is recorded.

Does not: open, verify or name the file (`transfer` does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import httpx2

from localrun.errors import SourceChanged
from localrun.models.download import answer
from localrun.models.download.answer import Answer, PassingFailure
from localrun.models.download.item import Item
from localrun.models.download.link import Link
from localrun.models.download.partial import Partial
from localrun.models.download.ranges import Range, split
from localrun.models.download.shared import Shared
from localrun.models.download.together import all_or_first_error


class ContentChanged(Exception):
    """The server has another content now, called `validator`: what came so far is worthless."""

    def __init__(self, validator: str) -> None:
        super().__init__(validator)
        self.validator = validator


class Filling:
    """`report` is told how many bytes are there."""

    def __init__(
        self,
        item: Item,
        partial: Partial,
        link: Link,
        shared: Shared,
        *,
        report: Callable[[int], None],
    ) -> None:
        self._item = item
        self._partial = partial
        self._link = link
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
        await all_or_first_error([self._fill_part(part) for part in parts])
        await self._shared.in_thread(self._partial.sync)

    async def _fill_part(self, part: Range) -> None:
        limits, pace = self._shared.limits, self._shared.pace
        n_failures = 0
        async with pace.connections:
            while (wanted := self._wanted(part)) is not None:
                await pace.rest()
                n_left_bytes = self._n_left_bytes(part)
                try:
                    await self._receive(part, wanted)
                    failure = PassingFailure(f"{self._link.host} ended the answer early")
                except PassingFailure as passing:
                    failure = passing
                except httpx2.TransportError as error:
                    failure = PassingFailure(f"{self._link.host}: {str(error) or type(error).__name__}")
                if self._wanted(part) is None:
                    return
                has_progress = n_left_bytes - self._n_left_bytes(part) >= limits.progress_bytes
                n_failures = 1 if has_progress else n_failures + 1
                await pace.failed(n_failures, failure, self._item.name)

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
        response = await self._link.get(wanted, validator)
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

    def _check(self, found: Answer) -> None:
        """Raises SourceChanged for another size, ContentChanged for another validator if it is heeded."""
        header = self._partial.header
        if found.total_bytes not in (None, header.size_bytes):
            raise SourceChanged(
                f"{self._item.name} has {found.total_bytes} bytes on {self._link.host} instead of {header.size_bytes}; "
                f"pull again to get the new version"
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
                await self._shared.pace.received(len(chunk))
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


def read_answer(response: httpx2.Response, asked: Range, item: Item) -> Answer:
    """As `answer.read`, of an answer whose headers have come."""
    host, now = response.url.host, datetime.now(UTC)
    return answer.read(response.status_code, response.headers, asked, name=item.name, host=host, now=now)
