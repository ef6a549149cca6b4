"""API keys: what each may do, how they are made and checked, and the file that they are kept in.

A key is `lrk_ID_SECRET`. The ID finds its entry, the secret has 256 random bits. The file holds scrypt's hash of the
secret and never the secret; beside it stand 32 bits of a quick hash, so that a wrong secret is told from the right one
without scrypt's 50 ms, and 10,000 of them cost nothing. They tell an attacker who has the file an eighth of the secret.

`keys.json` in the data folder is written by the command line alone (mode 0600, replaced as a whole, one writer at a
time) and read by daemons, who notice a new one by its inode, time and size.

The *local key* is another one: a daemon makes a new one at each start, for the programs of the user that it runs as,
and accepts it on loopback alone. Its file is named by the port, so nobody who takes the port of a daemon that has
ended learns a key that is worth anything.

Does not: count what a key has used (`quotas.py`, `books.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from localrun import stored
from localrun.config import ConfigError, in_short
from localrun.errors import Conflict, DiskFull, NotFound, of_disk
from localrun.wire import Lane

FILE_NAME = "keys.json"
VERSION = 1
PREFIX = "lrk_"
LOCAL_PREFIX = "lrl_"
LOCAL_NAME = "local"
# A name is a label of metrics, and every entry is in memory.
MAX_KEYS = 1000
_NAME = re.compile(rf"(?!{LOCAL_NAME}\Z)[A-Za-z0-9][A-Za-z0-9._-]{{0,31}}\Z", re.ASCII)
_MAX_TIME_S = 1e11  # in the year 5138
_MAX_AMOUNT = 10**15
_KEY = re.compile(rf"{PREFIX}([a-z0-9]{{10}})_([A-Za-z0-9_-]{{43}})", re.ASCII)
_ID_CHARACTERS = "abcdefghijkmnpqrstuvwxyz23456789"

LANES = tuple(Lane)  # best first

NO_LIMIT = -1  # of `Key.storage_bytes`

REQUESTS: Final = "requests"
TOKENS: Final = "tokens"
PROMPT_TOKENS: Final = "prompt_tokens"
OUTPUT_TOKENS: Final = "output_tokens"

Kind = Literal["requests", "tokens", "prompt_tokens", "output_tokens"]
# What a file that somebody edited may say; `Key` and `Limit` have the meanings.
_Time = Annotated[float, Meta(ge=0, le=_MAX_TIME_S)]


class Limit(msgspec.Struct, frozen=True, array_like=True):
    """At most `amount` of `kind` in `per_s` seconds. TOKENS are those of prompt and output together."""

    kind: Kind
    amount: Annotated[int, Meta(ge=1, le=_MAX_AMOUNT)]
    per_s: Annotated[float, Meta(ge=1)]

    @property
    def per(self) -> str:
        """second, minute, hour, day or week."""
        return _NAMES_BY_S.get(self.per_s, f"{self.per_s:g} seconds")

    @property
    def text(self) -> str:
        """As people write it: 60/min."""
        unit = next((name for name, seconds in _SHOWN_UNITS if seconds == self.per_s), f"{self.per_s:g}s")
        return f"{_short(self.amount)}/{unit}"


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One key. Times are seconds since the epoch. `lane` is the best that its requests get, `models` are patterns (all,
    if there are none), `n_concurrent` 0 is any number. `storage_bytes` are those of its files and batches at most, None
    for the setting, NO_LIMIT for any number. A key that is `read_only` may ask models and change nothing; an
    `admin` sees what others do, and may end it unless it is read-only, too."""

    id: Annotated[str, Meta(pattern=f"^[{_ID_CHARACTERS}]{{10}}$")]
    name: Annotated[str, Meta(pattern=f"^{_NAME.pattern}")]
    salt: Annotated[bytes, Meta(min_length=16, max_length=16)]
    hash: Annotated[bytes, Meta(min_length=32, max_length=32)]
    check: Annotated[bytes, Meta(min_length=4, max_length=4)]
    created_at_s: _Time
    expires_at_s: _Time | None = None
    revoked_at_s: _Time | None = None
    lane: Lane = Lane.INTERACTIVE
    models: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    n_concurrent: Annotated[int, Meta(ge=0)] = 0
    storage_bytes: Annotated[int, Meta(ge=NO_LIMIT)] | None = None
    read_only: bool = False
    admin: bool = False

    def problem(self, now_s: float) -> str | None:
        """Why it opens nothing any more; None if it does."""
        if self.revoked_at_s is not None:
            return "was revoked"
        if self.expires_at_s is not None and now_s >= self.expires_at_s:
            return "has expired"
        return None

    def allows_model(self, name: str) -> bool:
        """Whether it may use a model or an adapter of this name, with or without tag."""
        names = {name.lower(), in_short(name.lower())}
        return not self.models or any(fnmatchcase(one, pattern.lower()) for one in names for pattern in self.models)

    def lane_of(self, asked: Lane) -> Lane:
        """The lane that a request gets: the one it asks for, if it is not better than the key's."""
        return max(asked, self.lane, key=LANES.index)


class _File(msgspec.Struct, kw_only=True):
    version: int = VERSION
    keys: list[Key] = []


class _Version(msgspec.Struct):
    version: int = VERSION


class NewKey(msgspec.Struct, frozen=True):
    """A key and its text, which is not kept anywhere."""

    key: Key
    text: str


def split(text: str) -> tuple[str, str] | None:
    """The ID and the secret of a key's text; None for what cannot be a key."""
    match = _KEY.fullmatch(text)
    return None if match is None else (match[1], match[2])


def is_probable(key: Key, secret: str) -> bool:
    """Whether the secret can be the key's, by its quick hash: one wrong secret of four billion can."""
    return hmac.compare_digest(_check(key.salt, secret), key.check)


def is_secret(key: Key, secret: str) -> bool:
    """Whether the secret is the key's. Takes 50 ms and 16 MiB; for a thread."""
    return hmac.compare_digest(_slow_hash(key.salt, secret), key.hash)


def _check(salt: bytes, secret: str) -> bytes:
    return hashlib.blake2b(secret.encode(), digest_size=4, salt=salt, person=b"localrun check").digest()


def _slow_hash(salt: bytes, secret: str) -> bytes:
    return hashlib.scrypt(secret.encode(), salt=salt, n=2**14, r=8, p=1, dklen=32)


def _with_secret(make: Callable[[bytes, bytes, bytes], Key]) -> NewKey:
    salt, secret = secrets.token_bytes(16), secrets.token_urlsafe(32)
    key = make(salt, _slow_hash(salt, secret), _check(salt, secret))
    return NewKey(key, f"{PREFIX}{key.id}_{secret}")


class KeyFile:
    """See the module. Reading never waits; changing takes a lock."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def stamp(self) -> tuple[int, int, int] | None:
        """Changes whenever the file does; None while there is none."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_ctime_ns, found.st_size

    def read(self) -> list[Key]:
        """All keys, also those that open nothing any more. Raises ConfigError for a file that is damaged, and for one
        of a newer version: it may say what a key may not do in words that this one does not know."""
        try:
            content = stored.contents(self.path)
            version = msgspec.json.decode(content, type=_Version).version
            if version > VERSION:
                raise ConfigError(
                    f"{self.path} was made by a newer localrun (version {version}, this one knows {VERSION}); use that "
                    f"one, or remove the file and make new keys"
                )
            found = msgspec.json.decode(content, type=_File).keys
            for field in ("name", "id"):
                values = [getattr(key, field) for key in found]
                if len(set(values)) < len(values):
                    raise msgspec.ValidationError(f"two keys have the same {field}")
            return found
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self.path} cannot be read: {error}; restore it, or remove it and make new keys"
            ) from None

    def create(self, name: str, **rules: object) -> NewKey:
        """Add a key. `rules` are fields of `Key`. Raises Conflict for a name that is taken, ConfigError for one that
        cannot be."""
        if _NAME.fullmatch(name) is None:
            raise ConfigError(
                f"{name!r} cannot be a key's name; use up to 32 letters, digits, dots, hyphens and underscores, and "
                f"not {LOCAL_NAME!r}"
            )

        with self._changing() as keys:
            if any(key.name == name for key in keys):
                raise Conflict(
                    f"there is a key named {name!r} already; choose another name, or give it a new secret with "
                    f"`localrun key rotate {name}`"
                )
            if len(keys) >= MAX_KEYS:
                raise Conflict(f"there are {MAX_KEYS} keys, which is the limit; remove some with `localrun key rm`")
            fields = {"id": _new_id({key.id for key in keys}), "name": name, "created_at_s": time.time(), **rules}
            new = _with_secret(lambda salt, hash_, check: Key(salt=salt, hash=hash_, check=check, **fields))  # type: ignore[arg-type]
            keys.append(new.key)
        return new

    def change(self, name: str, make: Callable[[Key], Key]) -> Key:
        """A key with other rules and the same secret. `make` gets the one that there is. Raises NotFound, and Conflict
        for a key that was revoked."""
        with self._changing() as keys:
            at, key = _find(keys, name)
            if key.revoked_at_s is not None:
                raise Conflict(
                    f"the key {name!r} was revoked; remove it with `localrun key rm {name}` and make another"
                )
            keys[at] = make(key)
        return keys[at]

    def revoke(self, name: str) -> Key:
        """From now on it opens nothing. Raises NotFound."""
        with self._changing() as keys:
            at, key = _find(keys, name)
            keys[at] = msgspec.structs.replace(key, revoked_at_s=key.revoked_at_s or time.time())
        return keys[at]

    def rotate(self, name: str) -> NewKey:
        """A new secret for a key; the old one opens nothing from now on. Raises NotFound, and Conflict for one that was
        revoked or has expired."""
        with self._changing() as keys:
            at, old = _find(keys, name)
            problem = old.problem(time.time())
            if problem is not None:
                raise Conflict(
                    f"the key {name!r} {problem}; remove it with `localrun key rm {name}` and create it anew"
                )
            new = _with_secret(
                lambda salt, hash_, check: msgspec.structs.replace(old, salt=salt, hash=hash_, check=check)
            )
            keys[at] = new.key
        return new

    def remove(self, name: str) -> None:
        """Forget a key. Without any, none is asked for on loopback. Raises NotFound."""
        with self._changing() as keys:
            del keys[_find(keys, name)[0]]

    @contextmanager
    def _changing(self) -> Iterator[list[Key]]:
        """All keys, which are written when the block ends without an exception."""
        try:
            with stored.locked(self.path):
                keys = self.read()
                yield keys
                stored.write(self.path, _File(keys=keys))
        except TimeoutError as error:
            raise Conflict(str(error)) from None
        except OSError as error:
            if isinstance(full := of_disk(error), DiskFull):
                raise DiskFull(f"{full.message}; the keys are as they were") from None
            raise


def _find(keys: Sequence[Key], name: str) -> tuple[int, Key]:
    for at, key in enumerate(keys):
        if key.name == name:
            return at, key
    raise NotFound(f"there is no key named {name!r}; `localrun key list` lists the keys")


def _new_id(taken: set[str]) -> str:
    while True:
        new = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(10))
        if new not in taken:
            return new


# --- the local key ---


def local_key_path(state: Path, port: int) -> Path:
    """The file with the key that local programs use for the daemon at this port."""
    return state / f"local-key-{port}"


def make_local_key(state: Path, port: int) -> str:
    """A new local key, in its file."""
    text = LOCAL_PREFIX + secrets.token_urlsafe(32)
    stored.replace(local_key_path(state, port), text.encode())
    return text


def local_key(state: Path, port: int) -> str:
    """The local key of the daemon at this port; empty if there is none."""
    return stored.read_text(local_key_path(state, port), "ascii")


def local_ports(state: Path) -> list[int]:
    """The ports of daemons with a local key; one that was killed has left it behind."""
    ports = (path.name.rpartition("-")[2] for path in state.glob(local_key_path(Path(), 0).name.replace("0", "*")))
    return sorted(int(port) for port in ports if port.isdecimal())


# --- what people write ---

_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_UNIT_NAMES = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), "s"),
    **dict.fromkeys(("m", "min", "minute", "minutes"), "min"),
    **dict.fromkeys(("h", "hour", "hours"), "h"),
    **dict.fromkeys(("d", "day", "days"), "d"),
    **dict.fromkeys(("w", "week", "weeks"), "w"),
}
_SHOWN_UNITS = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("day", 86400.0), ("week", 604800.0))
_NAMES_BY_S = {1.0: "second", 60.0: "minute", 3600.0: "hour", 86400.0: "day", 604800.0: "week"}
_MULTIPLES = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "t": 1_000_000_000_000}
_LIMIT = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,6})?)(?P<multiple>[kmg]?)/(?P<unit>[a-z]+)", re.ASCII)
_SIZE = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,6})?)(?P<multiple>[kmgt]?)b?", re.ASCII)
_DURATION = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,6})?)(?P<unit>[a-z]+)", re.ASCII)


def parse_limit(kind: Kind, text: str) -> Limit:
    """`60/min`, `1M/day`, `2.5k/h`. Raises ConfigError."""
    match = _LIMIT.fullmatch(text.strip().lower().replace(" ", "").replace("_", ""))
    unit = _UNIT_NAMES.get(match["unit"]) if match else None
    amount = int(float(match["number"]) * _MULTIPLES[match["multiple"]]) if match else 0
    if unit is None or unit == "w" or not 1 <= amount <= _MAX_AMOUNT:
        raise ConfigError(f"{text!r} is not a limit; write a number and a time, such as 60/min, 500/h or 1M/day")
    return Limit(kind, amount, _UNITS_S[unit])


def parse_duration_s(text: str) -> float:
    """`30d`, `12h`, `90min`. Raises ConfigError."""
    match = _DURATION.fullmatch(text.strip().lower().replace(" ", ""))
    unit = _UNIT_NAMES.get(match["unit"]) if match else None
    seconds = float(match["number"]) * _UNITS_S[unit] if match and unit else 0.0
    if not 0 < seconds <= 36500 * _UNITS_S["d"]:
        raise ConfigError(f"{text!r} is not a time; write a number and a unit, such as 90min, 12h or 30d")
    return seconds


def parse_size_bytes(text: str) -> int:
    """`500M`, `1.5G`, `2GB`: decimal, as sizes are shown. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip().lower().replace(" ", ""))
    n_bytes = int(float(match["number"]) * _MULTIPLES[match["multiple"]]) if match else 0
    if not 1 <= n_bytes < 2**60:
        raise ConfigError(f"{text!r} is not a size; write a number and a unit, such as 500M, 1G or 2.5T")
    return n_bytes


def _short(amount: int) -> str:
    for multiple, unit in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if amount >= multiple and amount % (multiple // 10) == 0:
            return f"{amount / multiple:g}{unit}"
    return str(amount)
