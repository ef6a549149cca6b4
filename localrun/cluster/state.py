"""What the cluster's head keeps for all doors: the books of API keys, and what is deployed. A door's half, and the
messages, are in `ledger.py`.

The books are those of the head's own daemon, in whose event loop this runs: doors borrow from the same quotas as its
own requests, their sums are in the same file, and `localrun key` and `localrun usage` on the head mean all doors. What
is deployed is in `cluster-apps.json` in the state folder, and is deployed again when the head comes back.

Requests of a door that is lost count as running for `LEASE_S`, unless it comes back.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import sqlite3
import ssl
import threading
import time
from pathlib import Path

import msgspec

from localrun import __version__, framing, stored
from localrun.access.books import OwnBooks
from localrun.access.keys import Key
from localrun.access.quotas import LEASE_S, Asked, Lent
from localrun.cluster import frames, ledger, reports
from localrun.cluster.reports import Deploy
from localrun.config import ConfigError
from localrun.errors import BadRequest, Conflict, LocalrunError, RateLimited, Unauthorized, Unavailable

MAX_KNOCK_BYTES = 1 << 17
DEPLOY_AGAIN_S = 5.0
_NO_KEYS = b'{"version":1,"keys":[]}'

_log = logging.getLogger(__name__)
_apps: msgspec.json.Decoder[dict[str, Deploy]] = msgspec.json.Decoder(dict[str, Deploy])


class State:
    """See the module. `folder` is for what is deployed, `token` what doors have to know."""

    def __init__(self, books: OwnBooks, folder: Path, token: bytes) -> None:
        self._books, self._token = books, token
        self._path = folder / "cluster-apps.json"
        self.apps = stored.read(self._path, _apps) or {}  # that are deployed, by Serve's names
        self._keys: dict[str, Key] = {}
        self._stamp: object = ()  # of no file
        self._content = _NO_KEYS
        self._doors: set[str] = set()
        self._running: dict[str, dict[str, int]] = {}  # by door and key
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        self._conversations: set[asyncio.Task[None]] = set()
        self._is_over = False

    async def run(self, at: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Answers at a socket that listens, until it is cancelled."""
        server = await asyncio.start_server(self._serve, sock=at, ssl=tls)
        try:
            await asyncio.Event().wait()
        finally:
            self._is_over = True
            server.close()
            for task in self._conversations:
                task.cancel()

    # --- what is deployed ----------------------------------------------------------------------------------------

    @property
    def models(self) -> list[str]:
        return [one.description.model for one in self.apps.values()]

    def deploy_again(self) -> None:
        """Returns at once. What is taken back or changed in the meantime is as it was said last."""
        threading.Thread(target=self._deploy_again, name="cluster-deploy", daemon=True).start()

    def _deploy_again(self) -> None:
        for app in list(self.apps):
            while (asked := self.apps.get(app)) is not None:
                try:
                    list(reports.ask(msgspec.structs.replace(asked, wait_s=0.0)))
                    break
                except (LocalrunError, OSError) as error:
                    _log.warning("'%s' is not deployed again yet: %s", asked.description.model, error)
                time.sleep(DEPLOY_AGAIN_S)

    # --- doors ---------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        door, content = "", b""  # what it has of the keys
        try:
            message = framing.decoded(ledger.to_head, await ledger.read_body(reader, MAX_KNOCK_BYTES))
            door = self._let_in(message)
            while not self._is_over:
                answer = await self._answer(door, message)
                if isinstance(answer, ledger.News) and answer.keys == content:
                    answer = msgspec.structs.replace(answer, keys=None)
                elif isinstance(answer, ledger.News) and answer.keys is not None:
                    content = answer.keys
                writer.write(framing.encode(answer))
                message = framing.decoded(ledger.to_head, await ledger.read_body(reader))
        except LocalrunError as error:
            writer.write(framing.encode(frames.Refused(code=error.code, message=error.message)))
        except (*ledger.LOST, asyncio.CancelledError):
            pass
        finally:
            self._conversations.discard(task)
            if door:
                self._left(door)
            writer.close()

    def _let_in(self, knock: ledger.ToHead) -> str:
        """The door that comes; empty for a command. Raises LocalrunError."""
        if not isinstance(knock, ledger.Knock) or not hmac.compare_digest(knock.token, self._token):
            raise Unauthorized("this is not the cluster's token")
        if knock.protocol != ledger.PROTOCOL:
            raise BadRequest(
                f"localrun {knock.version} speaks protocol {knock.protocol}, the head (localrun {__version__}) "
                f"{ledger.PROTOCOL}: update the older one"
            )
        door = knock.door
        if door in self._doors:
            raise Conflict(
                "another door has the same name for the head, so the data folder of one is a copy of the other's; "
                "remove the folder cluster-* in the copy"
            )
        if door:
            self._doors.add(door)
            if (timer := self._leaving.pop(door, None)) is not None:
                timer.cancel()
            self._look()
            for key_id in {*self._running.get(door, {}), *knock.running}:
                self._runs(door, key_id, knock.running.get(key_id, 0))
        return door

    def _left(self, door: str) -> None:
        def forget() -> None:
            del self._leaving[door]
            for key_id in list(self._running[door]):
                self._runs(door, key_id, 0)

        self._doors.discard(door)
        if self._running.get(door):
            self._leaving[door] = asyncio.get_running_loop().call_later(LEASE_S, forget)

    def _runs(self, door: str, key_id: str, n_running: int) -> None:
        """So many requests of the key run there now."""
        if (key := self._keys.get(key_id)) is not None:
            running = self._running.setdefault(door, {})
            self._books.quota(key, time.time()).n_running += n_running - running.get(key_id, 0)
            running[key_id] = n_running

    async def _answer(self, door: str, message: ledger.ToHead) -> ledger.FromHead:
        is_noted = True
        try:
            self._look()
            if isinstance(message, Asked):
                return self._lend(door, message)
            if isinstance(message, ledger.AskTotals):
                return ledger.Totals(await self._books.totals(message.by, message.since_day, message.key))
            if isinstance(message, ledger.Look) and message.sums:
                self._books.usage.put(door, message.sums)
            elif isinstance(message, ledger.Keep):
                apps = {name: app for name, app in self.apps.items() if name != message.name}
                apps |= {} if message.app is None else {message.name: message.app}
                stored.write(self._path, apps)
                self.apps = apps
        except (sqlite3.Error, OSError) as error:
            _log.warning("what a door tells cannot be written down: %s", error)
            is_noted = False
            if isinstance(message, ledger.AskTotals):
                return frames.Refused(code=Unavailable.code, message=str(error))
        return ledger.News(keys=self._content, models=self.models, is_noted=is_noted)

    def _look(self) -> None:
        """Whether there are other keys."""
        stamp = self._books.keys.stamp()
        if stamp == self._stamp:
            return
        try:
            found = self._books.keys.read()
            self._content = stored.contents(self._books.keys.path) if stamp is not None else _NO_KEYS
        except (ConfigError, OSError) as error:  # those before stay
            _log.error("%s", error)
            return
        self._stamp = stamp
        self._keys = {key.id: key for key in found}
        self._books.follow(self._keys, time.time())

    def _lend(self, door: str, asked: Asked) -> Lent:
        key, now_s = self._keys.get(asked.key_id), time.time()
        if key is None:
            return Lent(refusal="this API key was removed")
        self._runs(door, key.id, asked.n_running)
        quota = self._books.quota(key, now_s)
        quota.settle(asked.left, now_s)
        lent = Lent()
        if asked.n_wanted:
            try:
                n, amounts = quota.lend(asked.n_wanted, now_s)
                self._running[door][key.id] += n
                lent = Lent(n=n, amounts=amounts)
            except RateLimited as error:
                lent = Lent(refusal=error.message, retry_after_s=error.retry_after_s, kind=error.kind)
        # Before the door may give it out: whatever happens then, it is taken.
        if key.limits:
            self._books.usage.write(key.id, quota.levels(), None, now_s)
        return msgspec.structs.replace(lent, standings=list(quota.standings(now_s).values()))
