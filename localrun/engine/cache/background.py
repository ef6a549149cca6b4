"""One thread that does jobs in order, beside the step loop.

What waits is bounded in bytes: a job that comes with data is refused rather than queued when the data of those before
it take too much memory, so that a slow disk never holds up a step and never fills memory.

Invariants: jobs run one at a time, in the order of `put`; a job that raises is logged, and the next one runs. The
thread never keeps the process from ending.
Does not: know what the jobs do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger("localrun.engine")


class Background:
    """See the module. Starts its thread at once. All methods may be called from any thread but its own."""

    def __init__(self, name: str, backlog_bytes: int) -> None:
        self._backlog_bytes = backlog_bytes
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._waiting_bytes = 0
        self._is_busy = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None], n_bytes: int = 0) -> bool:
        """Have `job` done. False, and then it is not, when its `n_bytes` are too much on top of what waits; a job
        without bytes is always taken, and any job is while the thread is not behind."""
        with self._changed:
            is_too_much = n_bytes and self.is_behind and self._waiting_bytes + n_bytes > self._backlog_bytes
            if is_too_much or self._is_closed:
                return False
            self._jobs.append((job, n_bytes))
            self._waiting_bytes += n_bytes
            self._changed.notify_all()
        return True

    @property
    def is_behind(self) -> bool:
        """Whether the backlog is full up to its half: a job with data may be refused."""
        return self._waiting_bytes > self._backlog_bytes // 2

    def flush(self, deadline_s: float) -> bool:
        """Wait until nothing waits or runs, at most so many seconds. Whether that came to pass."""
        end_s = time.monotonic() + deadline_s
        with self._changed:
            while self._jobs or self._is_busy:
                left_s = end_s - time.monotonic()
                if left_s <= 0 or not self._thread.is_alive():
                    return False
                self._changed.wait(left_s)
        return True

    def close(self, deadline_s: float) -> None:
        """Drop what waits, and give the running job so many seconds to end."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(deadline_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                job, n_bytes = self._jobs.popleft()
                self._is_busy = True
            try:
                job()
            except Exception:
                log.exception("a background job failed")
            # The job may hold megabytes, and the next one may be long in coming.
            del job
            with self._changed:
                self._waiting_bytes -= n_bytes
                self._is_busy = False
                self._changed.notify_all()
