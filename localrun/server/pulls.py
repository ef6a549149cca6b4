"""The downloads of models: one per model, however many ask, and they outlive the daemon.

Owner: the event loop. A pull runs in a task of its own; those who ask for a model that is being pulled already watch
that pull (`PullProgress`). It is cancelled when the last who asked for it leaves, or by name; what was transferred
stays on disk for the next one. Pulls that run when the daemon ends, in whatever way, are listed in a small file in the
state folder, and go on when it starts again; nobody's leaving cancels those.
Does not: transfer anything (models/pull.py does).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from localrun import stored
from localrun.errors import Cancelled, DownloadFailed, LocalrunError, NotFound, Unavailable
from localrun.hardware.memory import machine_memory
from localrun.models import pull as model_pull
from localrun.models.download.fetch import new_client
from localrun.models.download.huggingface import Hub
from localrun.models.download.plan import FetchLimits, Item, RemotePlan
from localrun.models.name import ModelName
from localrun.models.storage import manifest
from localrun.models.storage.manifest import ManifestKey
from localrun.models.storage.store import Store
from localrun.server.engines.machine import answering_gpus
from localrun.server.http.failures import unforeseen
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


# Ended pulls that are still listed, so that somebody who looks later sees how they ended.
MAX_ENDED = 16

_log = logging.getLogger(__name__)


class PullRequest(msgspec.Struct, frozen=True):
    """A pull that is to go on after a restart."""

    model: str
    is_insecure: bool = False
    projector: str = ""
    is_outward: bool = False


class _Pull:
    """One pull and those who wait for it."""

    def __init__(self, wanted: PullRequest, *, is_detached: bool) -> None:
        self.wanted = wanted
        self.progress = PullProgress(wanted.model)
        self.is_detached = is_detached
        self.n_watchers = 0
        self.is_cancelled = False
        self.task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return not self.progress.is_over and not self.is_cancelled

    def end_unbegun(self) -> None:
        """After its task: if that was cancelled before its first turn, nobody has said that it is over."""
        if not self.progress.is_over:
            self.progress.end(_cancelled())

    def cancel(self) -> None:
        """Ends it soon: what it transferred has yet to be written down."""
        self.is_cancelled = True
        if self.task is not None:
            self.task.cancel()


class Pulls:
    """`rate_bytes_per_s` bounds each pull; 0 is as fast as it goes. `journal` is the file of pulls that go on."""

    def __init__(self, store: Store, *, journal: Path, rate_bytes_per_s: int = 0, hub: Hub | None = None) -> None:
        self._store = store
        self._journal = journal
        self._limits = FetchLimits(rate_bytes_per_s=rate_bytes_per_s or None)
        self._hub = hub
        self._pulls: dict[ManifestKey, _Pull] = {}
        self._writing = asyncio.Lock()
        self._is_stopping = False

    async def start(self) -> None:
        """Goes on with the pulls of the daemon before."""
        for wanted in await asyncio.to_thread(_read, self._journal):
            with contextlib.suppress(LocalrunError):
                self._pull(wanted, is_detached=True)

    async def stop(self) -> None:
        """Ends all transfers; they go on when the daemon starts again."""
        self._is_stopping = True
        tasks = [pull.task for pull in self._pulls.values() if pull.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def hub(self) -> Hub:
        if self._hub is None:
            self._hub = Hub.from_environment()
        return self._hub

    @property
    def n_running(self) -> int:
        return sum(pull.is_running for pull in self._pulls.values())

    def rows(self) -> list[PullRow]:
        """All that run, and the last ones that ended; oldest first."""
        return [pull.progress.row() for pull in self._pulls.values()]

    @contextlib.contextmanager
    def joined(
        self, model: str, *, is_insecure: bool = False, projector: str = "", is_trusted: bool = True
    ) -> Iterator[PullProgress]:
        """The pull of a model, begun if there is none, as `models.pull.pull`. Leaving it while nobody else waits for it
        cancels it. Who is not trusted names no registry of this machine and its network: what it answers, and whether
        it does, would tell who is there.

        Raises BadRequest for what cannot be pulled, Unavailable while the daemon stops.
        """
        parsed = ModelName.parse(model)
        # Where the hub is, and Ollama's own registry, is the owner's to say.
        is_outward = not is_trusted and bool(parsed.registry_host) and not parsed.says_ollama
        pull = self._pull(PullRequest(model, is_insecure, projector, is_outward), is_detached=False)
        pull.n_watchers += 1
        try:
            yield pull.progress
        finally:
            pull.n_watchers -= 1
            if not pull.n_watchers and not pull.is_detached:
                pull.cancel()

    async def cancel(self, model: str) -> None:
        """Cancels the pull of a model, and waits for its end. Raises NotFound when none runs."""
        pull = self._pulls.get(ManifestKey.of(model))
        if pull is None or pull.task is None or not pull.is_running:
            raise NotFound(f"no pull of '{model}' is under way", field="model")
        pull.cancel()
        await asyncio.wait([pull.task])

    def _pull(self, wanted: PullRequest, *, is_detached: bool) -> _Pull:
        model_pull.check_name(wanted.model)
        if self._is_stopping:
            raise Unavailable("localrun is shutting down")
        key = ManifestKey.of(wanted.model)
        before = self._pulls.get(key)
        if before is not None and before.is_running:
            return before
        # At the end of the order, as the newest.
        self._pulls.pop(key, None)
        pull = self._pulls[key] = _Pull(
            msgspec.structs.replace(wanted, model=manifest.canonical(wanted.model)), is_detached=is_detached
        )
        self._forget_ended()
        pull.task = asyncio.create_task(self._run(pull, before.task if before is not None else None))
        pull.task.add_done_callback(lambda _: pull.end_unbegun())
        return pull

    async def _run(self, pull: _Pull, before: asyncio.Task[None] | None) -> None:
        """Every way a pull can end is written to its progress; none is raised. `before` is a cancelled pull of the same
        model, which may still have files open."""
        error: LocalrunError | None = None
        try:
            if before is not None:
                await asyncio.wait([before])
            await self._remember()
            await self._transfer(pull)
        except LocalrunError as failure:
            error = failure
        except asyncio.CancelledError:
            if self._is_stopping:
                error = Unavailable("the daemon is stopping; the pull goes on when it starts again")
            else:
                error = _cancelled()
        except Exception as bug:
            error = unforeseen(bug, f"pulling {pull.wanted.model}")
        try:
            if not self._is_stopping:
                await self._remember(without=pull)  # before anybody hears that it is over
        finally:
            pull.progress.end(error)

    async def _transfer(self, pull: _Pull) -> None:
        # A client of its own, whose connections end with it; reading the certificates takes a while.
        client = await asyncio.to_thread(new_client, is_outward=pull.wanted.is_outward)
        context = model_pull.PullContext(
            store=self._store, hub=self.hub, client=client, limits=self._limits, memory_bytes=await memory_bytes()
        )
        try:
            async with client:
                await model_pull.pull(
                    pull.wanted.model,
                    context=context,
                    observer=pull.progress,
                    is_insecure=pull.wanted.is_insecure,
                    projector=pull.wanted.projector,
                )
        except (DownloadFailed, Unavailable) as error:
            if pull.progress.is_planned or not await asyncio.to_thread(self._is_here, pull.wanted.model):
                raise
            # Offline, with the model on disk, there is nothing that the one who asks would miss.
            pull.progress.status(f"no newer version could be looked for ({error.message}); the one here is kept")
            pull.progress.status("success")

    def _is_here(self, model: str) -> bool:
        try:
            self._store.resolve(model)
        except LocalrunError:
            return False
        return True

    def _forget_ended(self) -> None:
        ended = [key for key, pull in self._pulls.items() if pull.progress.is_over]
        for key in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._pulls[key]

    async def _remember(self, *, without: _Pull | None = None) -> None:
        """Writes down which pulls run. A full disk costs the resumption, not the pull."""
        async with self._writing:
            wanted = [pull.wanted for pull in self._pulls.values() if pull.is_running and pull is not without]
            try:
                await asyncio.to_thread(_write, self._journal, wanted)
            except OSError as error:
                _log.warning("%s cannot be written: %s", self._journal, error)


def _cancelled() -> Cancelled:
    return Cancelled("the pull was cancelled; what was transferred is kept for the next one")


async def memory_bytes() -> int:
    """What a model can be laid out in, whatever is loaded now: this machine's memory, or that of its GPUs together if
    they have more."""
    ram_bytes = (await asyncio.to_thread(machine_memory)).total_bytes
    return max(ram_bytes, sum(gpu.emptied.free_bytes for gpu in await answering_gpus() if not gpu.is_shared))


def _read(journal: Path) -> list[PullRequest]:
    try:
        return msgspec.json.decode(stored.contents(journal), type=list[PullRequest])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        aside = journal.with_suffix(".unreadable")
        with contextlib.suppress(OSError):
            journal.replace(aside)
        _log.warning("%s cannot be read and is now %s; pulls of before do not go on: %s", journal, aside.name, error)
        return []


def _write(journal: Path, wanted: list[PullRequest]) -> None:
    if wanted:
        stored.write(journal, wanted)
    else:
        journal.unlink(missing_ok=True)
