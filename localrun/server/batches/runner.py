"""Runs the lines of batches, in the lane `batch`, beside whatever else the daemon does.

One task in the daemon's event loop, and one for each line that runs. It keeps the slots of one model's engine busy but
for one, which stays free for others: they find it at once, and take more by their lane. Lines of several batches with
one model take turns. Batches that want another model wait: two models that do not fit beside each other would only
evict one another. After `TURN_S` it is the next one's turn.

A batch yields. For `QUIET_S` after anybody else's request it runs few lines, so that steps are short, and loads no
model in place of others. When others wait for room, its lines are given up, to be computed again later. What is only
for now (a full queue, short memory, an engine that died) holds the lines of its batch for a while, and the line runs
again; other answers are results. A full disk holds all lines.

However the daemon ends, a line without a result runs again, and none has two (`store.py`).

Does not: know what lines say (`lines.py`), or serve routes (`service.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from starlette.types import ASGIApp

from localrun.errors import InvalidKey, LocalrunError, RateLimited, of_disk
from localrun.server.batches import lines
from localrun.server.batches.files import Blobs
from localrun.server.batches.lines import LineResult
from localrun.server.batches.store import Api, Batch, Ending, Kind, Line, Store, StoredFile, new_id, read_results
from localrun.server.http.access import OWNER, Access, Caller
from localrun.snapshot import BatchRow

if TYPE_CHECKING:
    from localrun.server.engines.resident import Capacity
    from localrun.server.jobs.registry import Registry
    from localrun.server.metering.telemetry import Telemetry
    from localrun.server.targets import Targets

TURN_S = 600.0
QUIET_S = 60.0
# While others use the machine, only so many lines run that a step takes about as long: others' streams have their
# tokens in the same steps. On a CPU that is a line or two, and more would hardly be faster; on a GPU all of them.
STEP_S = 0.012
# How often it looks whether others need room, while lines run.
_LOOK_S = 0.25
_SWEEP_S = 3600.0
_READ_LINES = 256
_MAX_HOLD_S = 60.0
# Anthropic keeps results for so long.
RESULTS_KEPT_S = 29 * 86_400.0

# Answers that are for now, by their code, and how often a line may have them; the others are results. Memory and disk
# get ten tries, which is some minutes: what never fits is told in the end.
_FOR_NOW = {
    "queue_full": 10**9, "rate_limit_exceeded": 10**9, "unavailable": 10**9, "cannot_fit": 10, "disk_full": 10,
    "engine_died": 2, "engine_failed": 2,
}  # fmt: skip

RATE_WINDOW_S = 60.0
# A batch whose API key has used what it may for now is left alone for so long; the others go on.
_LIMITED_S = 10.0

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Ask(Protocol):
    """How the store is asked: in its thread."""

    async def __call__(self, question: Callable[[Store], T], /) -> T: ...


class _Hold:
    """No line begins until `until_s`; longer each time, up to a minute, until something went well."""

    def __init__(self) -> None:
        self.until_s = 0.0
        self.why = ""  # also while a line tries again
        self._n_times = 0

    def begin(self, why: str, hold_s: float | None = None) -> bool:
        """False while it holds: the lines that run then have all the same reason."""
        now_s = time.monotonic()
        if self.until_s > now_s:
            return False
        self.why = why
        self.until_s = now_s + (min(_MAX_HOLD_S, 2.0**self._n_times) if hold_s is None else hold_s)
        self._n_times = min(self._n_times + 1, 10)
        return True

    def end(self) -> None:
        self.until_s, self.why, self._n_times = 0.0, "", 0

    @property
    def left_s(self) -> float:
        return max(0.0, self.until_s - time.monotonic())


class _Open:
    """A batch that has not ended. `queue` are its next lines; the store has more of them after `place` until
    `is_read`. `work` is what is done with all of it: checking its input, or writing its results. `ends_s` are when its
    lines of the last minute were done."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.queue: deque[Line] = deque()
        self.place = 0
        self.is_read = False
        self.running: dict[int, asyncio.Task[None]] = {}
        self.n_tries: dict[int, int] = {}
        self.work: asyncio.Task[None] | None = None
        self.is_ending = False
        self.hold = _Hold()
        self.ends_s: deque[float] = deque()

    def done(self, kind: Kind) -> None:
        """A line has a result: counted here as well as in the store, for those who look."""
        batch = self.batch
        n_succeeded = batch.n_succeeded + (kind is Kind.SUCCEEDED)
        n_errored = batch.n_errored + (kind is Kind.ERRORED)
        self.batch = msgspec.structs.replace(batch, n_succeeded=n_succeeded, n_errored=n_errored)
        self.hold.end()  # of a key that may have few requests at once, one has ended
        self.ends_s.append(time.monotonic())

    def row(self, held_by: str) -> BatchRow:
        batch, now_s = self.batch, time.monotonic()
        while self.ends_s and now_s - self.ends_s[0] > RATE_WINDOW_S:
            self.ends_s.popleft()
        lasted_s = now_s - self.ends_s[0] if self.ends_s else 0.0
        return BatchRow(
            id=batch.id,
            api=batch.endpoint,
            model=batch.model or (self.queue[0].model if self.queue else ""),
            state="finalizing" if self.is_ending and batch.status == "in_progress" else batch.status,
            lines=batch.n_lines,
            succeeded=batch.n_succeeded,
            errored=batch.n_errored,
            running=len(self.running),
            lines_per_s=(len(self.ends_s) - 1) / lasted_s if len(self.ends_s) > 1 and lasted_s > 0 else None,
            expires_in_s=max(0.0, batch.expires_at - time.time()),
            waits_for=self.hold.why or held_by,
        )

    @property
    def takes_lines(self) -> bool:
        return self.work is None and self.batch.ending is Ending.NONE and self.batch.status == "in_progress"


@dataclass(kw_only=True, eq=False)
class Runner:
    """See the module. `endpoints` are the routes that lines may name. It stops starting lines when `is_stopping`."""

    ask: Ask
    database: Path
    blobs: Blobs
    endpoints: Mapping[str, ASGIApp]
    capacity: Capacity
    registry: Registry
    access: Access
    telemetry: Telemetry
    targets: Targets
    is_stopping: Callable[[], bool]
    max_line_bytes: int

    def __post_init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._wake = asyncio.Event()
        self._has_changed = True
        self._model = ""
        self._turn_began_s = 0.0
        self._hold = _Hold()
        self._sweep_at_s = 0.0

    @property
    def n_open(self) -> int:
        """Batches that have not ended."""
        return len(self._open)

    def rows(self) -> list[tuple[str, BatchRow]]:
        """Batches that have not ended, oldest first, with whose they are."""
        return [(one.batch.owner, one.row(self._hold.why)) for one in self._open.values()]

    def changed(self) -> None:
        """A batch was made or cancelled."""
        self._has_changed = True
        self._wake.set()

    async def run(self) -> None:
        """Until it is cancelled, or the daemon stops. Lines that run then are given up by `stop`."""
        while not self.is_stopping():
            self._wake.clear()
            try:
                pause_s = await self._look()
            except (LocalrunError, OSError, sqlite3.Error) as error:
                self._hold_all(error)
                pause_s = self._hold.left_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(0.0, pause_s))

    async def stop(self) -> None:
        tasks = [task for one in self._open.values() for task in (*one.running.values(), one.work) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> float:
        """Does what is to be done now. Seconds until there may be more."""
        if self._has_changed:
            self._has_changed = False
            try:
                batches = await self.ask(Store.open_batches)
            except BaseException:
                self._has_changed = True
                raise
            self._open = {batch.seq: self._known(batch) for batch in batches}
        now = time.time()
        if now >= self._sweep_at_s:
            self._sweep_at_s = now + _SWEEP_S
            await self._sweep(now)
        pause_s = self._sweep_at_s - now
        for one in self._open.values():
            if one.work is not None:
                continue
            batch = one.batch
            if batch.ending is not Ending.NONE:
                one.work = self._spawn(one, self._end(one, batch.ending))
            elif now >= batch.expires_at:
                one.work = self._spawn(one, self._end(one, Ending.EXPIRED))
            elif batch.status == "validating":
                one.work = self._spawn(one, self._validate(one))
            pause_s = min(pause_s, batch.expires_at - now)
        return min(pause_s, await self._feed())

    def _known(self, batch: Batch) -> _Open:
        one = self._open.get(batch.seq) or _Open(batch)
        one.batch = batch
        return one

    def _spawn(self, one: _Open, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def finish() -> None:
            try:
                await work
            except (LocalrunError, OSError, sqlite3.Error) as error:
                self._hold_all(error)
                await asyncio.sleep(self._hold.left_s)
            else:
                self._hold.end()
            finally:
                one.work = None
                self.changed()

        return asyncio.create_task(finish())

    # --- lines ---------------------------------------------------------------------------------------------------

    async def _feed(self) -> float:
        """Starts lines, as many as there is room for. Seconds until there may be more."""
        if self.is_stopping():
            return _SWEEP_S
        for one in self._open.values():
            if one.takes_lines and not one.queue:
                await self._read(one)
        if self._hold.left_s > 0:
            return self._hold.left_s
        heads: dict[str, list[_Open]] = {}
        waiting = [one for one in self._open.values() if one.takes_lines and one.queue]
        for one in waiting:
            if one.hold.left_s <= 0:
                heads.setdefault(one.queue[0].model, []).append(one)
        n_running = sum(len(one.running) for one in self._open.values())
        if not heads:
            return _LOOK_S if n_running or waiting else _SWEEP_S
        model = self._whose_turn(list(heads))
        if model != self._model:
            if n_running:  # of the model before
                return _LOOK_S
            self._model, self._turn_began_s = model, time.monotonic()
        models = self.targets.names(model)
        n_slots = self.capacity.slots_of(models[0])
        if n_slots and self.capacity.n_wanting_room:
            self._give_up_lines(n_running)
            return _LOOK_S
        left_s = QUIET_S - self.registry.quiet_s()
        if left_s > 0 and not n_slots and not n_running:
            for one_model in models:
                if await self.capacity.would_evict(one_model):
                    return left_s
        n_most = max(1, n_slots - 1)
        if left_s > 0:
            n_most = min(n_most, self.capacity.streams_within(models[0], STEP_S))
            self._give_up_lines(n_running - n_most)
        n_free = n_most - n_running
        turns = deque(heads[model])
        while n_free > 0 and turns:
            one = turns.popleft()
            line = one.queue.popleft()
            one.running[line.place] = asyncio.create_task(self._run(one, line))
            n_free -= 1
            if one.queue and one.queue[0].model == model:
                turns.append(one)
        return _LOOK_S

    def _whose_turn(self, models: list[str]) -> str:
        """Of these, of which the oldest batch's is the first."""
        if self._model not in models:
            return models[0]
        if len(models) == 1 or time.monotonic() - self._turn_began_s < TURN_S:
            return self._model
        return models[(models.index(self._model) + 1) % len(models)]

    async def _read(self, one: _Open) -> None:
        """More lines; when there are none, and none runs, the batch is complete."""
        if not one.is_read:
            found = await self.ask(lambda store: store.pending(one.batch.seq, one.place, _READ_LINES))
            one.queue.extend(found)
            one.is_read = len(found) < _READ_LINES
            one.place = found[-1].place if found else one.place
        if one.is_read and not one.queue and not one.running:
            one.work = self._spawn(one, self._end(one, Ending.COMPLETED))

    async def _run(self, one: _Open, line: Line) -> None:
        """Stores the line's result. If it must run again, it is the next line, and its usage is not counted."""
        is_done, caller = False, OWNER
        try:
            try:
                caller = self.access.caller_of(one.batch.owner)
                await caller.prepare()
                answered = await self._answer(one.batch, line, caller)
            except InvalidKey as error:
                answered = lines.refused(error, is_anthropic=one.batch.api is Api.ANTHROPIC)
            if self._is_for_now(one, line, answered):
                why = lines.message_of(answered.body)
                if one.hold.begin(why, _LIMITED_S if answered.code == RateLimited.code else None):
                    _log.info("batch %s waits %.0f s: %s", one.batch.id, one.hold.left_s, why)
            else:
                recording = asyncio.create_task(self._record(one, line, answered))
                while not recording.done():  # what is written down was used, however often the line is given up now
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([recording])
                await recording
                is_done = True
                self._hold.end()
        except (LocalrunError, OSError, sqlite3.Error) as error:
            self._hold_all(error)
        finally:
            caller.leave()
            del one.running[line.place]
            if not is_done:
                one.queue.appendleft(line)
            if is_done or one.is_ending:
                caller.commit()
            else:
                caller.rollback()
            self._wake.set()

    async def _answer(self, batch: Batch, line: Line, caller: Caller) -> LineResult:
        is_anthropic = batch.api is Api.ANTHROPIC
        try:
            text = await asyncio.to_thread(self.blobs.read_at, batch.input_file_id, line.offset, line.size_bytes)
            body = lines.body_of(text, batch.endpoint)
        except LocalrunError as error:  # the input is gone
            return lines.refused(error, is_anthropic=is_anthropic)
        return await lines.answer(self.endpoints[batch.endpoint], batch.endpoint, body, client=batch.id, caller=caller)

    def _is_for_now(self, one: _Open, line: Line, answered: LineResult) -> bool:
        if answered.status < 400 or answered.code not in _FOR_NOW:
            return False
        if self.is_stopping():
            return True
        one.n_tries[line.place] = one.n_tries.get(line.place, 0) + 1
        return one.n_tries[line.place] < _FOR_NOW[answered.code]

    async def _record(self, one: _Open, line: Line, answered: LineResult) -> None:
        batch = one.batch
        if batch.api is Api.ANTHROPIC:
            text = lines.anthropic_line(line, answered)
        else:
            text = lines.openai_line(line, answered, batch.id)
        kind = Kind.SUCCEEDED if answered.status < 400 else Kind.ERRORED
        usage = lines.usage_of(answered.body)
        if await self.ask(lambda store: store.record(batch.seq, line.place, kind, text, usage)):
            one.done(kind)
            self.telemetry.batch_lines(kind.name.lower(), 1)

    def _give_up_lines(self, n_lines: int) -> None:
        """So many, the youngest first. They run again later."""
        running = [task for one in self._open.values() for task in one.running.values()]
        for task in running[len(running) - max(0, n_lines) :]:
            task.cancel()

    def _hold_all(self, error: Exception) -> None:
        """What the store or the disk says counts for all batches."""
        why = str((of_disk(error) if isinstance(error, OSError) else None) or error)
        if self._hold.begin(why):
            _log.warning("batches wait %.0f s: %s", self._hold.left_s, why)

    # --- batches -------------------------------------------------------------------------------------------------

    async def _validate(self, one: _Open) -> None:
        batch = one.batch
        try:
            caller = self.access.caller_of(batch.owner)
            checked = await asyncio.to_thread(
                lines.check_input,
                self.blobs.path(batch.input_file_id),
                batch.endpoint,
                max_line_bytes=self.max_line_bytes,
                lacks=lambda name: self.targets.missing(caller, name),
            )
        except InvalidKey as error:
            checked = lines.Checked([], None, [lines.error_of(None, error.code, error.message)])
        except FileNotFoundError:
            gone = lines.error_of(None, "input_file_missing", "the input file is no longer there")
            checked = lines.Checked([], None, [gone])
        if checked.errors:
            await self.ask(lambda store: store.fail(batch.seq, checked.errors, time.time()))
            self.telemetry.batch_ended("failed")
        else:
            await self.ask(lambda store: store.start(batch.seq, checked.lines, checked.model, time.time()))

    async def _end(self, one: _Open, ending: Ending) -> None:
        one.is_ending = True
        for task in one.running.values():
            task.cancel()
        await asyncio.gather(*one.running.values(), return_exceptions=True)
        batch = await self.ask(lambda store: store.begin_end(one.batch.seq, ending, time.time()))
        output, error = await asyncio.to_thread(self._write_results, batch)
        await self.ask(lambda store: store.finish(batch.seq, output, error, time.time()))
        self.telemetry.batch_lines("canceled", batch.n_canceled)
        self.telemetry.batch_lines("expired", batch.n_expired)
        self.telemetry.batch_ended(str(ending))
        _log.info("batch %s: %s, %d of %d lines", batch.id, ending, batch.n_succeeded, batch.n_lines)

    def _write_results(self, batch: Batch) -> tuple[StoredFile | None, StoredFile | None]:
        """In a thread. What was computed well, and what was not; of Anthropic's batches all is in the first."""
        is_anthropic = batch.api is Api.ANTHROPIC
        prefix = "results-" if is_anthropic else "file-"
        n_in_error = 0 if is_anthropic else batch.n_lines - batch.n_succeeded
        output_id = new_id(prefix) if batch.n_lines > n_in_error else None
        error_id = new_id(prefix) if n_in_error else None
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(self.blobs.writing(output_id)) if output_id else None
            error = stack.enter_context(self.blobs.writing(error_id)) if error_id else None
            for result in read_results(self.database, batch.seq):
                text = result.body or lines.unanswered(result, batch.id, is_anthropic=is_anthropic)
                into = output if is_anthropic or result.kind is Kind.SUCCEEDED else error
                assert into is not None
                into.write(text)
        return self._file(batch, output_id, "output"), self._file(batch, error_id, "error")

    def _file(self, batch: Batch, file_id: str | None, what: str) -> StoredFile | None:
        if file_id is None:
            return None
        now = int(time.time())
        return StoredFile(
            id=file_id, owner=batch.owner, filename=f"{batch.id}_{what}.jsonl", purpose="batch_output",
            size_bytes=self.blobs.path(file_id).stat().st_size, created_at=now,
            expires_at=now + batch.output_expires_s if batch.output_expires_s else None,
        )  # fmt: skip

    async def _sweep(self, now: float) -> None:
        gone = await self.ask(lambda store: store.take_expired_files(now))
        gone += await self.ask(lambda store: store.archive(now - RESULTS_KEPT_S, now))
        await asyncio.to_thread(self.blobs.delete, gone)
