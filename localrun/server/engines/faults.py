"""Engines that die and engines that hang: when one may be started again, how the others are noticed, and which requests
are given to no engine any more.

Owner: the supervisor, and of the quarantine the jobs. Kernels that compute wrong are `kernels.py`'s.
Does not: start anything, or find out why an engine died (link.py, job.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple
from weakref import WeakSet

import msgspec
import psutil

from localrun import wire
from localrun.errors import EngineDied, LocalrunError, by_code
from localrun.server.engines.link import EngineLink

_log = logging.getLogger(__name__)

EARLY_S = 60.0
OPEN_S = 30.0
DEATHS_TO_OPEN = 3
FIRST_DELAY_S = 0.5
# So many engines in a row that somebody kills while they load are started once more.
MAX_KILLED_LOADS = 20


class Breaker:
    """Counts early deaths of one model's engines, one per model file; pure, time is an argument.

    An engine that dies while loading, or within `EARLY_S` after it without having computed anything, most likely met
    something that the next one will meet as well: a file that makes llama.cpp abort, or memory that is not there. Two
    such deaths in a row delay the next start, three stop starting for `OPEN_S`; then one attempt is let through, and
    its early death closes the door again. An engine that lived longer than `EARLY_S`, or has answered anything, clears
    the count: its end is an accident, and the next start is immediate. One that others ended counts as neither.
    """

    def __init__(self) -> None:
        self.n_early_deaths = 0
        self.last_error: LocalrunError | None = None
        self._last_death_s = 0.0

    def died(self, now_s: float, lived_s: float, error: LocalrunError, *, has_answered: bool = False) -> None:
        """An engine ended by itself or failed to load, `lived_s` after its load (0 when it never became ready)."""
        is_early = lived_s < EARLY_S and not has_answered
        self.n_early_deaths = self.n_early_deaths + 1 if is_early else 0
        self.last_error = error
        self._last_death_s = now_s

    def closed_for_s(self, now_s: float) -> float:
        """Seconds for which starting is refused; 0 when a start may be tried."""
        if self.n_early_deaths < DEATHS_TO_OPEN:
            return 0.0
        return max(0.0, self._last_death_s + OPEN_S - now_s)

    def check(self, model: str, now_s: float) -> None:
        """Raises the last error again while starting is refused."""
        closed_for_s = self.closed_for_s(now_s)
        if closed_for_s > 0 and self.last_error is not None:
            # Its end says that the next request starts a new engine, and here none is started.
            last = self.last_error.message.partition("; the next request")[0]
            raise by_code(
                self.last_error.code,
                f"model '{model}' failed {self.n_early_deaths} times in a row and is not tried again for "
                f"{closed_for_s:.0f} seconds; the last time: {last}",
            )

    def delay_s(self, now_s: float) -> float:
        """Seconds to wait before the next start: none after one death, then doubling from `FIRST_DELAY_S`."""
        if not 2 <= self.n_early_deaths < DEATHS_TO_OPEN:
            return 0.0
        backoff_s: float = FIRST_DELAY_S * 2 ** (self.n_early_deaths - 2)
        return max(0.0, self._last_death_s + backoff_s - now_s)


CHECK_EVERY_S = 10.0
SILENT_S = 30.0
# With a device: its driver may compile in another process, and what it computes takes no time of a processor.
SILENT_ON_DEVICE_S = 300.0
LEAST_CPU_S = 0.05  # per check; a waiting thread or two still costs a few milliseconds


class StallWatch:
    """Notices an engine that hangs: it owes answers, says nothing, and does not compute either.

    Runs as one task in the daemon's event loop. A step may honestly take minutes (a large prompt, a large model, a slow
    machine), so silence alone proves nothing. Silence while the process used no CPU time does: it is stopped, or it
    waits for something that does not come. Such an engine is killed; its jobs go on on a new one, or end. A load may
    also wait for a slow disk: it works as long as it gets more memory, or is seen waiting for the disk.

    Does not: judge engines that owe nothing.

    `links` gives the engines that are loading or ready; `has_devices`, whether they may load onto any.
    """

    def __init__(
        self, links: Callable[[], Iterable[EngineLink]], has_devices: Callable[[], bool] = lambda: False
    ) -> None:
        self._links = links
        self._has_devices = has_devices
        self._seen: dict[int, _Work] = {}
        self._told: WeakSet[EngineLink] = WeakSet()

    async def run(self) -> None:
        """Checks for ever; cancel it to end it."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            try:
                self.check(time.monotonic())
            except Exception:  # what the system says of a process can be anything, and the next look may do
                _log.exception("the engines could not be looked at")

    def check(self, now_s: float) -> None:
        """One look at every engine; two looks in a row without CPU time and with silence end it."""
        seen: dict[int, _Work] = {}
        for link in list(self._links()):
            pid = link.pid
            owes = link.is_loading or link.n_outstanding
            if link.is_preparing and link not in self._told:
                self._told.add(link)
                _log.info(
                    "preparing the device for '%s': its engine was not heard for seconds, as when a driver compiles "
                    "what is used for the first time",
                    link.model,
                )
            is_on_device = self._has_devices() if link.is_loading else link.is_on_device
            silent_s = SILENT_ON_DEVICE_S if is_on_device else SILENT_S
            if pid is None or not owes or now_s - link.last_frame_s < silent_s:
                continue
            work = _work(pid, is_loading=link.is_loading)
            if work is None:
                continue
            seen[pid] = work
            if pid in self._seen and not work.is_more_than(self._seen[pid]):
                what = "word of its load" if link.is_loading else "step"
                link.kill(f"hung: no {what} for {now_s - link.last_frame_s:.0f} seconds and no CPU time used")
        self._seen = seen


class _Work(NamedTuple):
    cpu_s: float
    loaded_bytes: int

    def is_more_than(self, before: _Work) -> bool:
        return self.cpu_s - before.cpu_s >= LEAST_CPU_S or self.loaded_bytes != before.loaded_bytes


def _work(pid: int, *, is_loading: bool) -> _Work | None:
    """What a process has done so far; None when that cannot be judged."""
    try:
        process = psutil.Process(pid)
        if is_loading and process.status() == psutil.STATUS_DISK_SLEEP:
            return None
        times = process.cpu_times()
        return _Work(times.user + times.system, process.memory_info().rss if is_loading else 0)
    except psutil.Error:
        return None


# Long enough for a client's own tries, short enough for a cause that goes away, such as memory that others had.
HELD_S = 600.0
MAX_HELD = 256
WAY_OUT = "Send it without what is unusual about it (its grammar, its length), and see `localrun doctor`"
Message = wire.Submit | wire.Embed | wire.Count


class _Held(NamedTuple):
    request_id: str
    until_s: float


class Quarantine:
    """Requests that killed engines, and are given no more of them, however often they are sent again.

    Clients send a request again that failed with a 500, and each time it would take two engines along. So what it was
    is remembered for a while, as a hash, and for its own client and model file alone (its `kind`): elsewhere the text
    may do no harm. Bounded by `MAX_HELD`; the oldest of the client who has most go first, so that nobody's requests
    push out another's.
    """

    def __init__(self) -> None:
        self.held: OrderedDict[tuple[Hashable, bytes], _Held] = OrderedDict()

    def put(self, kind: Hashable, message: Message, request_id: str) -> None:
        """Keeps a request that killed engines. People know it as `request_id`."""
        self.held[kind, _fingerprint(message)] = _Held(request_id, time.monotonic() + HELD_S)
        if len(self.held) > MAX_HELD:
            ((most, _),) = Counter(of for of, _ in self.held).most_common(1)
            del self.held[next(key for key in self.held if key[0] == most)]

    def check(self, kind: Hashable, message: Message) -> None:
        """Raises EngineDied for a request like one that was put here."""
        now_s = time.monotonic()
        while self.held and next(iter(self.held.values())).until_s <= now_s:
            self.held.popitem(last=False)
        if all(kind != of for of, _ in self.held):
            return
        held = self.held.get((kind, _fingerprint(message)))
        if held is not None:
            raise EngineDied(
                f"engines died of request '{held.request_id}', and this one is the same: it is not given to another "
                f"one for {held.until_s - now_s:.0f} seconds. {WAY_OUT}"
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
