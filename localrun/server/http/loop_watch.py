"""How long the event loop is held, and by which operation; and the way out of it for what grows with a body.

What one request computes in the loop, everybody's streams wait for. So each turn of a request's task, from one await to
the next, is timed, in the processor time of the loop's thread: a machine that is busy with something else does not
count. Parsing that keeps the interpreter's lock in another thread holds the loop as well, and is added by whoever does
it (`held`). All of it is in `/metrics` by operation; a turn beyond `STALL_S` is counted and logged with its name.

Work that grows with a request's body runs `apart`: of a large one in a thread. Whoever does that work knows no request,
so whether its body is large stands in its context, as notices do.

Owner: the daemon's event loop; `held` may be called by any thread. A turn takes 0.5 us more than without.
Does not: time what the parser of HTTP does (its bounds are connection.py's), or tasks that requests start.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

STALL_S = 0.1
# The processor's time is asked for no more often than this, for it takes a system call; shorter turns are what the
# clock says.
LONG_S = 0.005
# Where a route keeps its name, which is only known once the request is routed, and where the watch is found.
OPERATION, WATCH = "localrun.operation", "localrun.loop_watch"

# Less takes about a millisecond, and a thread costs a tenth of one.
THREAD_BYTES = 64 * 1024

# Of the request in whose context this is; set when its body is read (exchange.py).
IS_LARGE: ContextVar[bool] = ContextVar("is_large", default=False)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class LoopWatch(Collector):
    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._longest: defaultdict[str, float] = defaultdict(float)
        self._stalls: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._cpu_s = 0.0
        self.next_look_s = 0.0

    def watched(self, scope: Scope, serving: Coroutine[Any, Any, None]) -> _Watched:
        """The same to await, timed. `scope` is the request's."""
        scope[WATCH] = self
        return _Watched(self, scope, serving)

    def look(self, now_s: float) -> float:
        """The processor time of the loop's thread since the last look."""
        cpu_s = time.thread_time()
        since_s, self._cpu_s = cpu_s - self._cpu_s, cpu_s
        self.next_look_s = now_s + LONG_S
        return since_s

    def took(self, scope: Scope, seconds: float, longest_s: float) -> None:
        """The request has held the loop for so long in all, and for that long at once."""
        operation = _operation(scope)
        with self._lock:
            self._seconds[operation] += seconds
            self._longest[operation] = max(self._longest[operation], longest_s)

    def stalled(self, scope: Scope, seconds: float) -> None:
        """The request held the loop for so long at once."""
        operation = _operation(scope)
        with self._lock:
            self._stalls[operation] += 1
        _log.warning("%s held the event loop for %.0f ms; all streams waited", operation, seconds * 1000)

    def collect(self) -> Iterable[Metric]:
        """For `/metrics`."""
        longest = GaugeMetricFamily(
            "localrun_loop_longest_seconds", "The longest that a request held the event loop at once.",
            labels=["operation"],
        )  # fmt: skip
        for operation, value in list(self._longest.items()):
            longest.add_metric([operation], value)
        yield longest
        for name, text, values in (
            ("seconds", "Processor time of requests in the event loop, by operation.", self._seconds),
            ("stalls", f"Times that a request held the event loop for more than {STALL_S:g} s.", self._stalls),
        ):
            family = CounterMetricFamily(f"localrun_loop_{name}", text, labels=["operation"])
            for operation, value in list(values.items()):
                family.add_metric([operation], value)
            yield family


def _operation(scope: Scope) -> str:
    return str(scope.get(OPERATION, "other"))


@contextmanager
def held(scope: Scope) -> Generator[None]:
    """In another thread: what runs inside keeps the interpreter's lock, and so the loop, all the time."""
    began_s = time.thread_time()
    try:
        yield
    finally:
        watch: LoopWatch | None = scope.get(WATCH)
        if watch is not None:
            seconds = time.thread_time() - began_s
            watch.took(scope, seconds, seconds)
            if seconds > STALL_S:
                watch.stalled(scope, seconds)


class _Watched:
    """Awaits a coroutine by hand, to see when each turn begins and ends."""

    __slots__ = ("_scope", "_serving", "_watch")

    def __init__(self, watch: LoopWatch, scope: Scope, serving: Coroutine[Any, Any, None]) -> None:
        self._watch = watch
        self._scope = scope
        self._serving = serving

    def __await__(self) -> Generator[Any, Any, None]:
        serving, clock, watch = self._serving, time.perf_counter, self._watch
        turn, total_s, longest_s = serving.send, 0.0, 0.0
        given: Any = None
        try:
            while True:
                began_s = clock()
                if began_s > watch.next_look_s:
                    watch.look(began_s)
                try:
                    waits_for = turn(given)
                except StopIteration:
                    return
                finally:
                    took_s = clock() - began_s
                    if took_s > LONG_S:
                        took_s = min(took_s, watch.look(began_s + took_s))
                        if took_s > STALL_S:
                            watch.stalled(self._scope, took_s)
                    total_s += took_s
                    if took_s > longest_s:
                        longest_s = took_s
                try:
                    yield waits_for
                    turn, given = serving.send, None
                except GeneratorExit:
                    serving.close()
                    raise
                except BaseException as thrown:
                    turn, given = serving.throw, thrown
        finally:
            given = waits_for = None  # an exception whose traceback has this frame would keep itself by them
            self._watch.took(self._scope, total_s, longest_s)


async def apart(work: Callable[Arguments, Result], /, *args: Arguments.args, **named: Arguments.kwargs) -> Result:
    """What `work` returns; in a thread where the request's body is large. Raises what it raises."""
    return await asyncio.to_thread(work, *args, **named) if IS_LARGE.get() else work(*args, **named)
