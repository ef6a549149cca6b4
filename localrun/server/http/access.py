"""Who a request comes from, and what that one may do: API keys, the local key, and those who have none.

Keys are asked for as soon as there is one in the key file, and always of what comes from another machine. They are read
from `Authorization: Bearer`, `x-api-key`, `api-key` and the password of `Authorization: Basic`. A changed file counts
from the next request on. Where no keys are asked for, everybody is the owner of the daemon, as a program is that shows
the local key.

A key that was right once is known by a digest of its text, with a secret of this process; scrypt runs once for each
key, in a thread. A wrong one costs microseconds. Who shows many wrong ones is told to wait, by address; right keys from
the same address pass all the same, since they are looked at first.

What one may do is decided here for whole routes, and by `Caller` for models, lanes and what a request uses. Acts that
change something are written to the audit log with their result.

Owner: one per daemon, on its event loop. Does not: know what a route does with a caller, or shape errors.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import Scope, Send

from localrun.access import keys
from localrun.access.books import AuditLog, Books, UsageFile, UsageRecord
from localrun.access.keys import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, TOKENS, Key
from localrun.access.quotas import Leased, Quota, QuotaState
from localrun.config import ConfigError, Settings
from localrun.errors import BadRequest, Forbidden, InvalidKey, ModelNotFound, TooManyFailures, Unavailable
from localrun.models.name import Kind, ModelName, split_adapters
from localrun.server.http.failures import Headers, Shape
from localrun.snapshot import RequestState
from localrun.wire import Lane

if TYPE_CHECKING:
    from localrun.server.jobs.generation import Generation

# A key file that cannot be read is tried again.
_LOOK_AGAIN_S = 1.0
_AWAY_RETRY_S = 10.0
# Texts that were right: old secrets of rotated keys go when their place is needed.
_MAX_KNOWN = 2 * keys.MAX_KEYS
# So many wrong keys in a row, and one more in so many seconds.
FAILURES = 10
FAILURE_EVERY_S = 6.0
MAX_ADDRESSES = 4096

_log = logging.getLogger(__name__)


class Right(Enum):
    """Who may use a route. Acts from `CANCEL` on are written to the audit log."""

    OPEN = "everybody: it says that there is something here, or is the page that asks for a key itself"
    USE = "every key"
    ADMIN = "admins: it shows what everybody does"
    CANCEL = "every key, for its own requests"
    CHANGE = "keys that are not read-only"
    ADMIN_CHANGE = "admins that are not read-only: it ends or forgets what is everybody's"


_AUDITED = (Right.CANCEL, Right.CHANGE, Right.ADMIN_CHANGE)


class Caller:
    """Who asks. Without a key it is the daemon's owner, who may do everything.

    `namespace` keeps what is cached of its prompts from others; empty for the owner. As a request's, it counts what the
    request uses: `begin` when it wants a model, `record_usage` at each answer's end, `leave` when it is over. One that
    `commits_later` counts nothing before `commit`, and by `rollback` nothing at all: the daemon computes it again.
    """

    def __init__(
        self,
        key: Key | None = None,
        quota: Quota | Leased | None = None,
        usage: UsageFile | None = None,
        *,
        commits_later: bool = False,
        storage_bytes: int = 0,
    ) -> None:
        self.key = key
        self._storage_bytes = storage_bytes
        self.id = "" if key is None else key.id
        self.name = keys.LOCAL_NAME if key is None else key.name
        self.namespace = self.id.encode("ascii")
        self.is_admin = key is None or key.admin
        self.may_change = key is None or not key.read_only
        self._quota = quota
        self._limited = quota if key is not None and key.limits else None
        self._usage = usage
        self._has_begun = self._has_place = False
        self._is_taken = False
        self._n_answers = 0
        self._commits_later = commits_later
        self._uncommitted: list[UsageRecord] = []

    async def prepare(self) -> None:
        """Before `begin`, at a door of a cluster, whose head may have to be asked; `leave` has to follow."""
        if isinstance(self._quota, Leased):
            self._has_place = await self._quota.ready()

    def begin(self, model: str, lane: Lane) -> Lane:
        """A request for a model: takes it from the quota, once, and returns the lane that it gets. Raises
        ModelNotFound for a model that the key may not use, and RateLimited."""
        key, quota = self.key, self._quota
        if key is None or quota is None:
            return lane
        self.check_model(model)
        if not self._has_begun:
            now_s = time.time()
            quota.admit(now_s)
            self._has_begun = self._is_taken = True
            if self._limited is not None:
                self._write(None, now_s)
        return key.lane_of(lane)

    def record_usage(self, record: Generation, *, counts_prompt: bool) -> None:
        """Records an answer's usage before the client sees its end. The prompt of several answers counts once."""
        if self._usage is None:
            return
        was_refused = record.state is RequestState.FAILED and not record.n_computed
        counts_prompt = counts_prompt and not was_refused
        n_prompt = (record.n_prompt or 0) if counts_prompt else 0
        n_cached = (record.n_cached or 0) if counts_prompt else 0
        model = record.model if record.was_loaded else ""
        used = UsageRecord(self.name, model, int(self._n_answers == 0), n_prompt, n_cached, record.n_output)
        self._n_answers += 1
        self._uncommitted.append(used)
        if not self._commits_later:
            self.commit()

    def commit(self) -> None:
        """Counts what was used and is not counted yet."""
        now_s = time.time()
        for used in self._uncommitted:
            if self._limited is not None:
                self._limited.use(used.n_prompt, used.n_output, now_s)
            self._write(used, now_s)
        self._uncommitted.clear()

    def rollback(self) -> None:
        """Undoes the charge of a request that failed for a reason on our side."""
        self._uncommitted.clear()
        if self._is_taken and self._limited is not None:
            now_s = time.time()
            self._limited.give_back(now_s)
            self._write(None, now_s)
        self._is_taken = False

    def _write(self, used: UsageRecord | None, now_s: float) -> None:
        if self._usage is not None:
            self._usage.write(self.id, [] if self._limited is None else self._limited.levels(), used, now_s)

    def leave(self) -> None:
        """The HTTP request is over."""
        if self._has_begun and self._quota is not None:
            self._quota.leave()
        elif self._has_place and isinstance(self._quota, Leased):
            self._quota.release(time.time())
        self._has_begun = self._has_place = False

    @property
    def storage_bytes(self) -> int:
        """How much its files and batches may take of the disk; 0 is any amount."""
        key = self.key
        if key is None or key.storage_bytes == keys.NO_LIMIT:
            return 0
        return self._storage_bytes if key.storage_bytes is None else max(1, key.storage_bytes)

    def check_change(self, act: str) -> None:
        """Raises Forbidden for a key that is read-only. `act` completes "may not"."""
        if not self.may_change:
            raise Forbidden(f"the key {self.name!r} is read-only: it may not {act}")

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound for a model that the key may not use, or that is a file of this machine by its path."""
        if not self.may_use_model(name):
            raise ModelNotFound(name[:200])

    def check_file(self, name: str) -> None:
        """Raises ModelNotFound for a draft model or an adapter that is a file of this machine by its path."""
        if not self.is_admin and _is_path(name):
            raise ModelNotFound(name[:200])

    def may_use_model(self, name: str) -> bool:
        """Whether the key may use it, and so know of it; of `model+adapter=0.5` all that it names."""
        key = self.key
        if key is None:
            return True
        if not key.admin and _is_path(name):
            return False
        try:
            named = split_adapters(name)
        except BadRequest:
            return key.allows_model(name.partition("+")[0])  # whoever reads it says what is wrong with it
        return all(map(key.allows_model, (named.model, *(adapter for adapter, _ in named.adapters))))

    def load_shown(self, said: dict[str, Any]) -> dict[str, Any]:
        """Load settings without the names of models and adapters that it may not use."""
        shown = {name: value for name, value in said.items() if name != "draft" or self.may_use_model(value)}
        if "adapters" in shown:
            named = shown["adapters"]
            texts = named.split(",") if isinstance(named, str) else named
            shown["adapters"] = [text for text in texts if self.may_use_model(text.partition("=")[0])]
        return shown

    def can_see(self, name: str) -> bool:
        """Whether requests of the one with this name are its own, or it sees those of all."""
        return self.is_admin or name == self.name

    def headers(self, shape: Shape) -> Headers:
        """What is left of its limits, in the words of the API family."""
        if self._limited is None:
            return []
        now_s = time.time()
        standings = self._limited.standings(now_s)
        return _anthropic_headers(standings, now_s) if shape is Shape.ANTHROPIC else _openai_headers(standings)


OWNER = Caller()


def _is_path(name: str) -> bool:
    """Whether a model's name may be read as a path of this machine."""
    if name.startswith(("/", ".", "~", "\\")) or name[1:3] in (":\\", ":/"):
        return True
    try:
        return ModelName.parse(split_adapters(name).model).kind is Kind.PATH
    except BadRequest:
        return False  # whoever reads it as a name says what is wrong with it


class Access:
    """See the module. `state` is the folder of the local key and the audit log."""

    def __init__(
        self, settings: Settings, books: Books, *, state: Path, clock: Callable[[], float] = time.time
    ) -> None:
        self.books = books
        self.usage = books.usage
        self.audit = AuditLog(state)
        self._file = books.keys
        self._state = state
        self._clock = clock
        self._settings = settings
        self._loopback_needs_key = settings.loopback_needs_key == "on"
        self._by_id: dict[str, Key] = {}
        self._stamp = self._file.stamp()
        self._take(self._file.read())
        self._look_again_at_s = -math.inf
        self._local_key = ""
        self._local_port = 0
        self._process_secret = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, tuple[str, bytes]] = OrderedDict()
        self._hashing = asyncio.Lock()
        self._throttle = Throttle()

    def has_usable_keys(self) -> bool:
        """Whether somebody could get in with a key now."""
        now_s = self._clock()
        return any(key.problem(now_s) is None for key in self._by_id.values())

    def make_local_key(self, port: int) -> None:
        """For the programs of this user, until `close`."""
        self._local_key = keys.make_local_key(self._state, port)
        self._local_port = port

    def close(self) -> None:
        """The daemon ends."""
        if self._local_port and keys.local_key(self._state, self._local_port) == self._local_key:
            keys.local_key_path(self._state, self._local_port).unlink(missing_ok=True)
        self.usage.close()

    # --- who is it -----------------------------------------------------------------------------------------------

    async def admit(self, scope: Scope, right: Right | None) -> Caller | None:
        """Who sends this request, to a route with this right or to none; None where nobody needs to say so, and nothing
        is counted.

        Raises InvalidKey, TooManyFailures, Forbidden for what this one may not do, and Unavailable at a door that does
        not know.
        """
        self._look()
        is_local = is_loopback(scope)
        if is_local and not self._by_id:
            return Caller(usage=self.usage, commits_later=True)  # nothing depends on it, so the answer does not wait
        if right is Right.OPEN:
            return None
        path: str = scope["path"]
        text = _shown_key(scope["headers"])
        address = address_of(scope)
        found = await self._find(text, is_local=is_local)
        if found is None and is_local and not self._loopback_needs_key:
            found = Caller(usage=self.usage)
        if isinstance(found, Caller):
            _check_right(found, right, f"{scope['method']} {path}")
            if right is Right.USE and scope["method"] == "POST":
                await found.prepare()
            return found
        wait_s, is_first = self._throttle.fail(address, time.monotonic())
        reason = found or ("no key" if not text else "unknown key")
        if wait_s is None:
            self.audit.write(who="", what=f"{scope['method']} {path[:200]}", address=address, result=reason)
            raise _refusal(text, found)
        if is_first:
            self.audit.write(who="", what="many wrong keys", address=address, result="is told to wait")
        raise TooManyFailures(
            f"too many requests without a valid API key came from {address}; try again in {math.ceil(wait_s)} s",
            retry_after_s=wait_s,
        )

    async def _find(self, text: str, *, is_local: bool) -> Caller | str | None:
        """The caller of a key, or why a known key is refused: expired or revoked. None for an unknown one."""
        if not text:
            return None
        if text.startswith(keys.LOCAL_PREFIX):
            is_right = is_local and self._local_key and hmac.compare_digest(text.encode(), self._local_key.encode())
            return Caller(usage=self.usage) if is_right else None
        split = keys.split(text)
        key = self._by_id.get(split[0]) if split is not None else None
        self._check_fresh()
        if split is None or key is None:
            return None
        digest = hashlib.blake2b(text.encode(), digest_size=32, key=self._process_secret).digest()
        if self._known.get(digest) != (key.id, key.hash):
            if not keys.is_probable(key, split[1]):
                return None
            async with self._hashing:
                if not await asyncio.to_thread(keys.is_secret, key, split[1]):
                    return None
            self._known[digest] = (key.id, key.hash)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        now_s = self._clock()
        return key.problem(now_s) or self.caller(key)

    def caller(self, key: Key, *, commits_later: bool = False) -> Caller:
        """A new request of a key. Whatever works for a key without an HTTP request begins and leaves by it, too."""
        quota = self.books.quota(key, self._clock())
        return Caller(
            key, quota, self.usage, commits_later=commits_later, storage_bytes=self._settings.key_storage_bytes
        )

    def still_admits(self, caller: Caller) -> bool:
        """Whether somebody who was let in would be again, with the same key: for streams that do not end by
        themselves."""
        if caller.key is None:
            return True
        self._look()
        key = self._by_id.get(caller.key.id) if self.books.is_fresh else None
        return key is not None and key.hash == caller.key.hash and key.problem(self._clock()) is None

    def caller_of(self, key_id: str) -> Caller:
        """The same of a key's ID, "" for the owner; it pays later. Raises InvalidKey for a key that opens nothing any
        more, and Unavailable while nobody knows."""
        self._look()
        if not key_id:
            return Caller(usage=self.usage, commits_later=True)
        self._check_fresh()
        key = self._by_id.get(key_id)
        problem = "was removed" if key is None else key.problem(self._clock())
        if key is None or problem is not None:
            raise InvalidKey(f"the API key that this is for {problem}; send it again with another one")
        return self.caller(key, commits_later=True)

    def name_of(self, key_id: str) -> str:
        """The name of a key, "" for the owner and for one that was removed."""
        key = self._by_id.get(key_id)
        return "" if key is None else key.name

    def _look(self) -> None:
        """Read the key file again if it has changed, which its inode, times and size say in a few microseconds."""
        now_s = time.monotonic()
        if now_s < self._look_again_at_s:
            return
        try:
            stamp = self._file.stamp()
            if stamp != self._stamp:
                self._take(self._file.read())
                self._stamp = stamp
        except (ConfigError, OSError) as error:
            # Those that were there stay: nobody gets in by damaging the file.
            self._look_again_at_s = now_s + _LOOK_AGAIN_S
            _log.error("%s", error)

    def _take(self, found: list[Key]) -> None:
        self._by_id = {key.id: key for key in found}
        self.books.follow(self._by_id, self._clock())

    def _check_fresh(self) -> None:
        if not self.books.is_fresh:
            raise Unavailable(
                "this door has not heard from the head of its cluster for too long to know which API keys hold",
                retry_after_s=_AWAY_RETRY_S,
            )

    # --- what it may do ------------------------------------------------------------------------------------------

    def auditing(self, caller: Caller, right: Right | None, scope: Scope, send: Send) -> Send:
        """`send`, noting the result of an act that changes something; for other requests, and without keys, `send`
        itself."""
        if right not in _AUDITED or not self._by_id:
            return send
        method, path = scope["method"], scope["path"]

        async def noting(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.audit.write(
                    who=caller.name, what=f"{method} {path[:200]}", address=address_of(scope),
                    result=str(message["status"]),
                )  # fmt: skip
            await send(message)

        return noting


def _check_right(caller: Caller, right: Right | None, act: str) -> None:
    if caller.key is None:
        return
    if right is Right.ADMIN and not caller.is_admin:
        raise Forbidden(f"{act} shows what everybody does, and the key {caller.name!r} is not an admin's")
    if right is Right.ADMIN_CHANGE and not caller.is_admin:
        raise Forbidden(f"{act} is for admins, and the key {caller.name!r} is not an admin's")
    if right in (Right.CHANGE, Right.ADMIN_CHANGE):
        caller.check_change(act)


def _refusal(text: str, problem: str | None) -> InvalidKey:
    if problem is not None:
        return InvalidKey(f"this API key {problem}; ask whoever runs this server for a new one")
    if text.startswith(keys.LOCAL_PREFIX):
        return InvalidKey("the local key is of another daemon, or of one that was restarted; try again")
    if text:
        return InvalidKey("this API key is not known here; `localrun key list` on the server shows those that are")
    return InvalidKey(
        "an API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`, or set LOCALRUN_API_KEY; "
        "`localrun key create` on the server makes one"
    )


def _shown_key(headers: list[tuple[bytes, bytes]]) -> str:
    """The first of the headers that hold keys which has one of ours; else the first that has any."""
    shown = ""
    for text in _shown_keys(headers):
        if text.startswith((keys.PREFIX, keys.LOCAL_PREFIX)):
            return text
        shown = shown or text
    return shown


def _shown_keys(headers: list[tuple[bytes, bytes]]) -> Iterator[str]:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, rest = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer":
                yield rest.strip()
            elif scheme.lower() == "basic":
                try:
                    yield base64.b64decode(rest, validate=True).decode("latin-1").partition(":")[2]
                except ValueError:  # not Base64, or not ASCII
                    continue
        elif name in (b"x-api-key", b"api-key"):
            yield value.decode("latin-1").strip()


def is_loopback(scope: Scope) -> bool:
    """Whether it comes from this machine by loopback, where nothing is encrypted."""
    client = scope.get("client")
    if scope.get("scheme") == "https":
        return False
    if client is None:
        return True
    host: str = client[0]
    return host.startswith("127.") or host == "::1"


def address_of(scope: Scope) -> str:
    """The address that a request comes from; of IPv6 the network, since one machine has all of its addresses."""
    client = scope.get("client")
    if client is None:
        return ""
    host: str = client[0]
    if ":" not in host:
        return host
    return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))


class Throttle:
    """How many wrong keys an address may show. Pure; bounded: of too many addresses the oldest are forgotten."""

    def __init__(self) -> None:
        # How many are left, when that was so, and whether this address was told to wait.
        self._left: OrderedDict[str, tuple[float, float, bool]] = OrderedDict()

    def fail(self, address: str, now_s: float) -> tuple[float | None, bool]:
        """One more. Returns how long it must wait before it is told again what is wrong, None if it need not, and
        whether it is told so for the first time."""
        left, at_s, was_told = self._left.pop(address, (float(FAILURES), now_s, False))
        left = min(float(FAILURES), left + (now_s - at_s) / FAILURE_EVERY_S)
        is_over = left < 1
        was_told = was_told and left < FAILURES
        self._left[address] = (left if is_over else left - 1, now_s, was_told or is_over)
        if len(self._left) > MAX_ADDRESSES:
            self._left.popitem(last=False)
        return (FAILURE_EVERY_S * (1 - left), not was_told) if is_over else (None, False)


# --- what is left, for clients ---


# The names of the headers, by API family: what is limited, and which fact of it is told.
_OPENAI, _ANTHROPIC = b"x-ratelimit-%(fact)b-%(what)b", b"anthropic-ratelimit-%(what)b-%(fact)b"
_FACTS = (b"limit", b"remaining", b"reset")
_ANTHROPIC_NAMES = {
    REQUESTS: b"requests", TOKENS: b"tokens", PROMPT_TOKENS: b"input-tokens", OUTPUT_TOKENS: b"output-tokens"
}  # fmt: skip
# All names that `Caller.headers` may have.
LIMIT_HEADERS = tuple(
    form % {b"fact": fact, b"what": what}
    for form, whats in ((_OPENAI, (b"requests", b"tokens")), (_ANTHROPIC, tuple(_ANTHROPIC_NAMES.values())))
    for what in whats
    for fact in _FACTS
)


def _limit_headers(form: bytes, what: bytes, standing: QuotaState, reset: bytes) -> Headers:
    values = (b"%d" % standing.limit.amount, b"%d" % standing.remaining, reset)
    return [(form % {b"fact": fact, b"what": what}, value) for fact, value in zip(_FACTS, values, strict=True)]


def _openai_headers(standings: dict[str, QuotaState]) -> Headers:
    told = {b"requests": standings[REQUESTS]} if REQUESTS in standings else {}
    of_tokens = [standing for kind, standing in standings.items() if kind != REQUESTS]
    if of_tokens:
        told[b"tokens"] = min(of_tokens, key=lambda one: one.remaining / one.limit.amount)
    return [
        header
        for what, standing in told.items()
        for header in _limit_headers(_OPENAI, what, standing, _go_duration(standing.reset_s))
    ]


def _go_duration(seconds: float) -> bytes:
    """As OpenAI has it: 120ms, 1s, 6m0s, 23h4m5s."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return b"%dh%dm%ds" % (hours, minutes, rest)
    return b"%dm%ds" % (minutes, rest) if minutes else b"%ds" % rest


def _anthropic_headers(standings: dict[str, QuotaState], now_s: float) -> Headers:
    result: Headers = []
    for kind, standing in standings.items():
        reset = datetime.fromtimestamp(now_s + standing.reset_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        result += _limit_headers(_ANTHROPIC, _ANTHROPIC_NAMES[kind], standing, reset.encode("ascii"))
    return result
