"""A door's half of the cluster's books: a copy of the head's keys, leases of quotas, and what was used until the head
has it. The head's half is `state.py`; the messages between them are here.

Over one connection, in frames as those to replicas, with the same token and TLS, the door asks one question after the
other, one at least every second. Nothing of Ray is needed: keys, quotas and use are the cluster's as soon as the head's
daemon answers. Without it a door goes on with the leases that it has, for `LEASE_S`, and with its copy of the keys, for
`KEYS_S`, also over a restart; then it refuses with 503. What is used is in a file of the door's own meanwhile.

Runs in the door's event loop. Does not: decide how much may be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import sqlite3
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from localrun import __version__, framing, stored
from localrun.access.books import Sum, Total, UsageFile
from localrun.access.keys import Key, KeyFile
from localrun.access.quotas import Asked, Leased, Lent
from localrun.cluster import frames, settings
from localrun.cluster.reports import Deploy
from localrun.config import ConfigError
from localrun.errors import LocalrunError, Unavailable, by_code

PROTOCOL = 1
LOOK_EVERY_S = 1.0
# So long a door believes its copy of the keys.
KEYS_S = 600.0
MAX_SUMS = 500
# While a door opens, and closes.
FETCH_S, STOP_S = 30.0, 2.0
# What ends a connection.
LOST = (OSError, EOFError, framing.FrameError)

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class Knock(msgspec.Struct, frozen=True, kw_only=True, tag="knock"):
    """The first message. `running` are the door's requests by the ID of their key; who is no `door` is a command."""

    protocol: int
    version: str
    token: bytes
    door: str = ""
    running: dict[str, int] = {}


class Look(msgspec.Struct, frozen=True, tag="look"):
    """What is new? And these sums are."""

    sums: list[Sum] = []


class AskTotals(msgspec.Struct, frozen=True, tag="ask_totals"):
    by: str
    since_day: str
    key: str | None


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """An app that is to be deployed again when the head comes back, or one that is not."""

    name: str
    app: Deploy | None


class News(msgspec.Struct, frozen=True, kw_only=True, tag="news"):
    """The file of keys, unless it is as it was, and the models that are deployed. `is_noted`: what came is on disk."""

    keys: bytes | None
    models: list[str]
    is_noted: bool = True


class Totals(msgspec.Struct, frozen=True, tag="totals"):
    totals: list[Total]


ToHead = Knock | Look | Asked | AskTotals | Keep
FromHead = News | Lent | Totals | frames.Refused
to_head: msgspec.msgpack.Decoder[ToHead] = msgspec.msgpack.Decoder(ToHead)
_from_head: msgspec.msgpack.Decoder[FromHead] = msgspec.msgpack.Decoder(FromHead)


class Head(NamedTuple):
    """Where the head's books are, and what lets others at them."""

    host: str
    port: int
    token: bytes
    encryption: ssl.SSLContext | None


def head_of(member: settings.Membership) -> Head:
    return Head(*member.books, settings.frames_token(), member.tls_to_connect())


async def read_body(reader: asyncio.StreamReader, n_most: int = framing.MAX_FRAME_BYTES) -> bytes:
    """The next frame. Raises those of `LOST`, also when nothing comes."""
    async with asyncio.timeout(frames.SILENCE_S):
        n_bytes = framing.body_length(await reader.readexactly(4))
        if n_bytes > n_most:
            raise framing.FrameError(f"a frame of {n_bytes} bytes was announced; the limit is {n_most}")
        return await reader.readexactly(n_bytes)


class Line:
    """A connection to the head: `open` first. `running` says what runs of each key, for a `door`."""

    def __init__(self, head: Head, door: str = "", running: Callable[[], dict[str, int]] = dict) -> None:
        self._head, self._door, self._running = head, door, running
        self._turn = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.is_open = False  # and answers

    async def open(self) -> News:
        """Raises Unavailable, and what the head refuses with."""
        host, port, token, encryption = self._head
        try:
            async with asyncio.timeout(frames.SILENCE_S):
                self._streams = await asyncio.open_connection(
                    host, port, ssl=encryption, server_hostname=host if encryption else None
                )
        except OSError as error:
            raise self._lost(error) from None
        knock = Knock(
            protocol=PROTOCOL, version=__version__, token=token, door=self._door, running=self._running()
        )  # fmt: skip
        news = await self.ask(knock, News)
        self.is_open = True
        return news

    async def ask(self, message: ToHead, kind: type[_Answer]) -> _Answer:
        """Raises Unavailable, and what the head refuses with."""
        async with self._turn:
            if self._streams is None:
                raise self._lost("the connection is closed")
            reader, writer = self._streams
            try:
                writer.write(framing.encode(message))
                said = framing.decoded(_from_head, await read_body(reader))
            except LOST as error:
                self.close()
                raise self._lost(error) from None
            except BaseException:  # the answer would be taken for that to the next question
                self.close()
                raise
        if isinstance(said, kind):
            return said
        self.close()
        if isinstance(said, frames.Refused):
            raise by_code(said.code, said.message)
        raise self._lost(f"it answers {type(said).__name__}")

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams, self.is_open = None, False

    def _lost(self, why: object) -> Unavailable:
        host, port, *_ = self._head
        what = f"the daemon on the cluster's head ({host}:{port}) does not answer"
        return Unavailable(f"{what}: {why}" if str(why) else what, retry_after_s=LOOK_EVERY_S)


async def keep(head: Head, name: str, app: Deploy | None) -> None:
    """For a command: see `Keep`. Raises Unavailable when it is not written down."""
    line = Line(head)
    try:
        await line.open()
        if not (await line.ask(Keep(name, app), News)).is_noted:
            raise Unavailable("the cluster's head cannot write down what is deployed; its log says why")
    finally:
        line.close()


class Ledger:
    """See the module, and `access.books.Books`. `folder` is for this cluster alone."""

    def __init__(self, head: Head, folder: Path) -> None:
        self.keys = KeyFile(folder)
        self.usage = UsageFile(folder)
        self.models: frozenset[str] = frozenset()  # that are deployed
        self._head = head
        # The door's name for the head, and as the file's time when that was heard last.
        self._door = folder / "door"
        self._heard_at_s = time.monotonic() - self._silent_s()
        self._quotas: dict[str, Leased] = {}
        self._line: Line | None = None
        self._n_told = -1
        self._task: asyncio.Task[None] | None = None

    # --- a door's life -------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Before there is an event loop: the keys. Raises Unavailable when they do not come."""
        until_s = time.monotonic() + FETCH_S
        while True:
            try:
                return asyncio.run(self._fetch())
            except Unavailable:
                if time.monotonic() > until_s:
                    raise
            time.sleep(LOOK_EVERY_S)

    async def _fetch(self) -> None:
        line = Line(self._head)
        try:
            await self._take(await line.open())
        finally:
            line.close()

    def start(self) -> None:
        if not self._door.exists():
            stored.replace(self._door, secrets.token_hex(8).encode("ascii"))
            os.utime(self._door, (0, 0))
        self._line = Line(self._head, self._door.read_text(encoding="ascii"), self._running)
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Tells the head what it does not know yet, if it is there."""
        if self._task is None or self._line is None:
            return
        with contextlib.suppress(LocalrunError, ConfigError, OSError):
            async with asyncio.timeout(STOP_S):
                await self._look()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._line.close()

    # --- books ---------------------------------------------------------------------------------------------------

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self._heard_at_s < KEYS_S

    def quota(self, key: Key, now_s: float) -> Leased:
        if key.id not in self._quotas:
            self._quotas[key.id] = Leased(key, self)
        return self._quotas[key.id]

    def follow(self, keys: Mapping[str, Key], now_s: float) -> None:
        for key_id, quota in list(self._quotas.items()):
            if key_id in keys:
                quota.follow(keys[key_id], now_s)
            elif not quota.held:
                del self._quotas[key_id]

    async def totals(self, by: str, since_day: str, key: str | None) -> list[Total]:
        """Of the whole cluster."""

        async def ask() -> list[Total]:
            await self._look()
            return (await self._asked(AskTotals(by, since_day, key), Totals)).totals

        return await asyncio.shield(ask())  # a client that leaves must not end the line for all

    # --- for leases ----------------------------------------------------------------------------------------------

    @property
    def is_there(self) -> bool:
        return self._line is not None and self._line.is_open

    async def lend(self, asked: Asked) -> Lent:
        return await self._asked(asked, Lent)

    # --- inside --------------------------------------------------------------------------------------------------

    async def _asked(self, message: ToHead, kind: type[_Answer]) -> _Answer:
        if self._line is None:
            raise Unavailable("this door is not open yet", retry_after_s=LOOK_EVERY_S)
        return await self._line.ask(message, kind)

    def _running(self) -> dict[str, int]:
        return {key_id: quota.held for key_id, quota in self._quotas.items() if quota.held}

    async def _follow(self) -> None:
        assert self._line is not None
        said = ""
        while True:
            try:
                if not self._line.is_open:
                    await self._take(await self._line.open())
                    for quota in self._quotas.values():
                        quota.tell()
                await self._look()
                said = ""
            except (LocalrunError, ConfigError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    _log.warning("this door goes on with what it knows: %s", said)
            for quota in self._quotas.values():
                quota.tick()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        """Tells what was used, and takes what is new. Raises Unavailable, ConfigError and OSError."""
        while True:
            n_writes, sums, is_readable = self.usage.n_writes, list[Sum](), True
            if n_writes != self._n_told:
                try:
                    sums = await asyncio.to_thread(self.usage.untold, MAX_SUMS)
                except sqlite3.Error:  # whoever writes it has said so
                    is_readable = False
            news = await self._asked(Look(sums), News)
            await self._take(news)
            if not (is_readable and news.is_noted):
                return
            try:
                self.usage.put("", sums)
            except (sqlite3.Error, OSError):  # it is told again
                return
            if len(sums) < MAX_SUMS:
                self._n_told = n_writes
                return

    async def _take(self, news: News) -> None:
        """Raises OSError, and ConfigError for keys that this version cannot read."""
        if news.keys is not None:
            if not self.keys.path.exists() or stored.contents(self.keys.path) != news.keys:
                await asyncio.to_thread(stored.replace, self.keys.path, news.keys)
            self.keys.read()
        self.models = frozenset(news.models)
        self._heard_at_s = time.monotonic()
        if self._door.exists():
            os.utime(self._door)

    def _silent_s(self) -> float:
        """Seconds since the head was heard; infinite where the clock cannot say."""
        try:
            silent_s = time.time() - self._door.stat().st_mtime
        except OSError:
            return math.inf
        return silent_s if silent_s >= 0 else math.inf
