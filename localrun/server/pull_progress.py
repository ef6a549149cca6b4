"""How far one pull is: what its watchers are told, and the figures of its row.

Owner: the event loop. Many may watch one pull; each sees every status and, of the bytes, the current state at most ten
times a second, however slowly it reads. Numbers never go backwards: they are what is on disk, and what a former attempt
left counts from the start, but not towards the rate.

Does not: pull.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from localrun.errors import Cancelled, LocalrunError
from localrun.models.download.item import Item
from localrun.models.sources.remote_plan import RemotePlan
from localrun.snapshot import PullRow

UPDATE_EVERY_S = 0.1
RATE_WINDOW_S = 10.0
_RATE_STEP_S = 0.25


class _File:
    """One file of the plan. `digest` is empty where the source does not tell one."""

    def __init__(self, item: Item) -> None:
        self.digest = f"sha256:{item.sha256}" if item.sha256 else ""
        self.status = f"pulling {item.sha256[:12] if item.sha256 else item.name}"
        self.total_bytes = item.size_bytes or 0
        self.done_bytes = 0
        self.has_started = False


class PullProgress:
    """The observer of one pull. `error` is set once, when it has failed; `is_over` in any case."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.is_over = False
        self.error: LocalrunError | None = None
        self._started_at_s = time.time()
        self._statuses: list[str] = []
        # Statuses after this one are about files that are complete.
        self._n_before_files = 0
        self._files: dict[str, _File] = {}
        self._samples: deque[tuple[float, int]] = deque()
        self._changed = asyncio.Event()

    # --- told by the pull -------------------------------------------------------------------------------------------

    def status(self, text: str) -> None:
        if text not in self._statuses[-1:]:
            self._statuses.append(text)
            self._tell()

    def planned(self, plan: RemotePlan) -> None:
        self._files = {str(item.target): _File(item) for item in plan.items}
        self._n_before_files = len(self._statuses)
        self._tell()

    def advanced(self, item: Item, n_bytes_done: int) -> None:
        file = self._files[str(item.target)]
        file.done_bytes = max(file.done_bytes, n_bytes_done)
        file.total_bytes = max(file.total_bytes, item.size_bytes or n_bytes_done)
        if not file.has_started:
            # What is on disk from the beginning was not transferred now.
            file.has_started = True
            self._samples.clear()
        self._sample(time.monotonic())
        self._tell()

    def verifying(self, item: Item) -> None:
        if all(file.done_bytes >= file.total_bytes for file in self._files.values()):
            self.status("verifying sha256 digest")

    def end(self, error: LocalrunError | None) -> None:
        """It is over; `error` is why it failed."""
        self.error = error
        self.is_over = True
        self._tell()

    # --- asked by others --------------------------------------------------------------------------------------------

    @property
    def is_planned(self) -> bool:
        """Whether its source has said what to fetch."""
        return bool(self._files)

    async def statuses(self) -> AsyncGenerator[dict[str, Any], None]:
        """Ollama's status objects from the beginning to the end. Raises the pull's error at the end."""
        n_told = 0
        told_bytes: dict[str, int] = {}
        while True:
            changed, is_over = self._changed, self.is_over
            n_before = min(len(self._statuses), self._n_before_files) if self._files else len(self._statuses)
            for text in self._statuses[n_told:n_before]:
                yield {"status": text}
            n_told = max(n_told, n_before)
            n_statuses = len(self._statuses)
            for key, file in self._files.items():
                if told_bytes.get(key) != file.done_bytes:
                    told_bytes[key] = file.done_bytes
                    yield _line(file)
            for text in self._statuses[n_told:n_statuses]:
                yield {"status": text}
            n_told = n_statuses
            if is_over:
                break
            await changed.wait()
            if not self.is_over:
                await asyncio.sleep(UPDATE_EVERY_S)
        if self.error is not None:
            raise self.error

    async def wait(self) -> None:
        """Returns when it is over. Raises the pull's error."""
        while not self.is_over:
            await self._changed.wait()
        if self.error is not None:
            raise self.error

    def row(self) -> PullRow:
        """For snapshots and lists."""
        total = sum(file.total_bytes for file in self._files.values())
        done = sum(file.done_bytes for file in self._files.values())
        rate = 0.0 if self.is_over else self._rate(time.monotonic())
        return PullRow(
            model=self.model,
            state=self._state(),
            status=self._statuses[-1] if self._statuses else "",
            total_bytes=total,
            completed_bytes=done,
            bytes_per_s=rate,
            eta_s=(total - done) / rate if rate > 0 else None,
            started_at_s=self._started_at_s,
            error=self.error.message if self.error is not None else None,
        )

    def _state(self) -> str:
        if self.is_over:
            return "done" if self.error is None else "cancelled" if isinstance(self.error, Cancelled) else "failed"
        return "pulling" if self._files else "planning"

    def _rate(self, now_s: float) -> float:
        while len(self._samples) > 1 and now_s - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        if len(self._samples) < 2:
            return 0.0
        began_s, began_bytes = self._samples[0]
        return (self._samples[-1][1] - began_bytes) / max(now_s - began_s, _RATE_STEP_S)

    def _sample(self, now_s: float) -> None:
        done = sum(file.done_bytes for file in self._files.values())
        if len(self._samples) > 1 and now_s - self._samples[-2][0] < _RATE_STEP_S:
            self._samples[-1] = (now_s, done)
        else:
            self._samples.append((now_s, done))

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _line(file: _File) -> dict[str, Any]:
    """As Ollama writes it: `completed` is left out while it is 0."""
    line: dict[str, Any] = {"status": file.status}
    if file.digest:
        line["digest"] = file.digest
    line["total"] = file.total_bytes
    if file.done_bytes:
        line["completed"] = file.done_bytes
    return line
