"""What the screens share while the app runs: the daemon, its latest snapshot, the model that is chatted with, and the
downloads.

One per app, owned by it. The app writes, screens read and subscribe; a screen never fetches what is here already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from textual.dom import DOMNode
from textual.signal import Signal

from localrun import attachments, last_model
from localrun.attachments import Kind
from localrun.config import folders
from localrun.errors import Cancelled, LocalrunError
from localrun.snapshot import EngineRow, PullRow, Snapshot
from localrun.tools.toolbox import Toolbox
from localrun.tui import short_text
from localrun.tui.daemon import Daemon, Recorder
from localrun.tui.history import DeletedChat, History
from localrun.tui.keys import key_of
from localrun.tui.pictures import Thumbnails
from localrun.tui.rates import RateSeries, RequestRates, Sample
from localrun.tui.short_text import line


@dataclass(eq=False)
class Session:
    """`owner` is the app, to which the signals belong. `trouble` says why there is no event stream; None while there is
    one, or before the first attempt has ended. `pulled` tells a model that was pulled and what went wrong with it, if
    anything. `recorder` is where snapshots are written to, if anywhere. `deleted` tells the number of a chat that is no
    more; `deleted_chats` are those that can be brought back, the latest last. `clock` gives seconds since the epoch.
    `can_start` says whether a daemon can be started from here, `is_replay` whether a recording stands in for one.
    `keymap` are the person's own keys. `toolbox` is None where no server of tools is configured. `last_model_file`
    keeps the name of the model that was used last, unless it is None."""

    owner: DOMNode
    _: KW_ONLY
    daemon: Daemon
    base_url: str
    client_name: str
    model: str
    history: History
    clock: Callable[[], float]
    thumbnails: Thumbnails
    can_start: bool = False
    is_replay: bool = False
    keymap: Mapping[str, str] = field(default_factory=dict)
    toolbox: Toolbox | None = None
    last_model_file: Path | None = None

    snapshot: Snapshot | None = field(default=None, init=False)
    trouble: str | None = field(default=None, init=False)
    recorder: Recorder | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # The name of another machine, where the daemon is; empty for this one.
        parts = urlsplit(self.base_url)
        self.machine = parts.hostname or "" if parts.scheme == "https" else ""
        self.rates = RateSeries()
        self.request_rates = RequestRates()
        self.pulls = Pulls(self.daemon, lambda model, problem: self.pulled.publish((model, problem)))
        self.deleted_chats: list[DeletedChat] = []
        self.snapshots: Signal[Snapshot] = Signal(self.owner, "snapshots")
        self.connection: Signal[str | None] = Signal(self.owner, "connection")
        self.models: Signal[str] = Signal(self.owner, "models")
        self.pulled: Signal[tuple[str, str | None]] = Signal(self.owner, "pulled")
        self.deleted: Signal[int] = Signal(self.owner, "deleted")
        self.recording_failed: Signal[str] = Signal(self.owner, "recording_failed")

    def key(self, name: str) -> str:
        """A key of the table, as it is with the person's own keys."""
        return key_of(name, self.keymap)

    def take(self, snapshot: Snapshot) -> None:
        """Keeps a snapshot and tells whoever shows it."""
        self.snapshot = snapshot
        aggregate = snapshot.aggregate
        self.rates.add(Sample(snapshot.time_s, aggregate.decode_tokens_per_s, aggregate.prefill_tokens_per_s))
        self.request_rates.add(snapshot)
        try:
            if self.recorder is not None:
                self.recorder.write(snapshot)
        except OSError as error:
            self.stop_recording()
            self.recording_failed.publish(error.strerror or str(error))
        if self.trouble is not None:
            self.trouble = None
            self.connection.publish(None)
        self.snapshots.publish(snapshot)

    def new_recording(self) -> Path:
        """A file name that is not taken, by the time of the latest snapshot."""
        now_s = self.snapshot.time_s if self.snapshot is not None else 0.0
        stamp = datetime.fromtimestamp(now_s, UTC).astimezone().strftime("%Y-%m-%d_%H-%M-%S")
        return folders().state / "recordings" / f"{stamp}.jsonl"

    def stop_recording(self) -> None:
        """Does nothing when nothing is recorded."""
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    def lose(self, reason: str) -> None:
        """The event stream ended. What was known stays, marked as old by `trouble`."""
        self.trouble = reason
        self.connection.publish(reason)

    def choose(self, model: str) -> None:
        """Chats go to this model from now on."""
        self.model = model
        self.models.publish(model)

    def last_model(self) -> str:
        """The one that was used last, before or now; empty where none is kept."""
        return "" if self.last_model_file is None else last_model.last_model(self.last_model_file)

    def remember_model(self, model: str) -> None:
        """It has begun to answer."""
        if self.last_model_file is not None:
            last_model.remember_model(self.last_model_file, model)

    async def capabilities(self, model: str) -> tuple[str, ...]:
        """What a model can do, in `/api/show`'s words. Raises LocalrunError."""
        return tuple((await self.daemon.show(model)).get("capabilities") or ())

    async def taken_kinds(self, model: str) -> frozenset[Kind]:
        """What may be attached to a question to a model. Raises LocalrunError."""
        return attachments.taken_kinds(await self.capabilities(model))

    def engine_of(self, model: str) -> EngineRow | None:
        """The engine that serves a model, by the model's canonical name; of several a ready one."""
        engines = [engine for engine in self.snapshot.engines if engine.model == model] if self.snapshot else []
        return max(engines, key=lambda engine: engine.state == "ready", default=None)


class Pulls:
    """The downloads that this window asked for, and what the daemon says of all of them.

    A pull goes on whatever screen is shown, and ends by being cancelled or with the app (the daemon keeps what was
    transferred). The daemon's list is asked while somebody looks. `on_end` is told the model and the problem, None when
    it is here."""

    def __init__(self, daemon: Daemon, on_end: Callable[[str, str | None], None]) -> None:
        self.rows: list[PullRow] = []
        self._daemon = daemon
        self._on_end = on_end
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, model: str) -> None:
        """Begins a pull, or goes on with one that was cut off; does nothing while it runs."""
        if model not in self._tasks:
            self._tasks[model] = asyncio.create_task(self._pull(model))

    @property
    def is_running(self) -> bool:
        """Whether a pull that this window asked for goes on."""
        return bool(self._tasks)

    async def look(self) -> None:
        """Asks the daemon for its list. Raises LocalrunError."""
        self.rows = await self._daemon.pulls()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pull(self, model: str) -> None:
        problem: str | None = None
        try:
            async with aclosing(self._daemon.pull(model)) as pieces:
                async for _ in pieces:
                    pass  # how far it is comes with the daemon's list, for all pulls alike
        except Cancelled:
            problem = "cancelled; Enter resumes it"
        except LocalrunError as error:
            problem = error.message
        finally:
            del self._tasks[model]
        self._on_end(model, problem)


def pull_line(row: PullRow) -> str:
    """One line: how far a pull is, how fast, how long still, or how it ended."""
    if row.state not in ("planning", "pulling"):
        return f"{line(row.model)}  {line(row.error or row.status or row.state)}"
    if not row.total_bytes:
        return f"{line(row.model)}  {line(row.status or 'looking for it')}"
    facts = [
        short_text.percent(row.completed_bytes / row.total_bytes),
        f"{short_text.size(row.completed_bytes)} of {short_text.size(row.total_bytes)}",
    ]
    if row.bytes_per_s:
        facts.append(f"{short_text.size(round(row.bytes_per_s))}/s")
    if row.eta_s is not None:
        facts.append(f"{short_text.age(row.eta_s)} left")
    return f"{line(row.model)}  {' · '.join(facts)}"
