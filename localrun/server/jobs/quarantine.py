"""Requests of which engines died: no more engines are given to them, however often they are sent again.

Clients send a request again that failed with a 500, and each time it would take two engines along. So what it was is
remembered for a while, as a hash, and for its own client and model file alone: elsewhere the text may do no harm.

Owner: the daemon's event loop. Bounded by `MAX_HELD`; the oldest of the client who has most go first, so that nobody's
requests push out another's.
Does not: find out what engines die of (link.py, job.py).
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

import msgspec

from localrun import wire
from localrun.errors import EngineDied

# Long enough for a client's own tries, short enough for a cause that goes away, such as memory that others had.
HELD_S = 600.0
MAX_HELD = 256


Message = wire.Submit | wire.Embed | wire.Count


class _Held(NamedTuple):
    request_id: str
    until_s: float


class Quarantine:
    """See the module. `kind` is whose request it is, and for which model file."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[Hashable, bytes], _Held] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def put(self, kind: Hashable, message: Message, request_id: str) -> None:
        """Engines died of this one, which people know as `request_id`."""
        self._held[kind, _fingerprint(message)] = _Held(request_id, time.monotonic() + HELD_S)
        if len(self._held) > MAX_HELD:
            ((most, _),) = Counter(of for of, _ in self._held).most_common(1)
            del self._held[next(key for key in self._held if key[0] == most)]

    def check(self, kind: Hashable, message: Message) -> None:
        """Raises EngineDied for a request like one that was put here."""
        now_s = time.monotonic()
        while self._held and next(iter(self._held.values())).until_s <= now_s:
            self._held.popitem(last=False)
        if all(kind != of for of, _ in self._held):
            return
        held = self._held.get((kind, _fingerprint(message)))
        if held is not None:
            raise EngineDied(
                f"engines died of request '{held.request_id}', and this one is the same: it is not given to another "
                f"one for {held.until_s - now_s:.0f} seconds. Send it without what is unusual about it (its grammar, "
                f"its length), and see `localrun doctor`"
            )


# When, by whom, and with which luck it is asked, and not what.
_BESIDE = {
    "id": 0,
    "client": "",
    "lane": wire.Lane.DEFAULT,
    "deadline_s": None,
    "arrived_at_s": 0.0,
    "target_itl_s": None,
}


def _fingerprint(message: Message) -> bytes:
    changes = {name: value for name, value in _BESIDE.items() if name in message.__struct_fields__}
    if isinstance(message, wire.Submit):
        changes["sampling"] = msgspec.structs.replace(message.sampling, seed=None)
    return hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(message, **changes))).digest()
