"""What the screens share while the app runs: the daemon, its latest snapshot, and the model that is chatted with.

One per app, owned by it. The app writes, screens read and subscribe; a screen never fetches what is here already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from textual.dom import DOMNode
from textual.signal import Signal

from localrun.config import folders
from localrun.snapshot import EngineRow, Snapshot
from localrun.tui.daemon import Daemon
from localrun.tui.history import Deleted, History
from localrun.tui.keys import key_of
from localrun.tui.pulls import Pulls
from localrun.tui.rates import RateSeries, RequestRates, Sample
from localrun.tui.recording import Recorder


class Session:
    """`trouble` says why there is no event stream; None while there is one, or before the first attempt has ended.
    `pulled` tells a model that was pulled and what went wrong with it, if anything. `recorder` is where snapshots are
    written to, if anywhere. `deleted` tells the number of a chat that is no more; `deleted_chats` are those that can
    be brought back, the latest last. `clock` gives seconds since the epoch. `can_start` says whether a daemon can be
    started from here, `is_replay` whether a recording stands in for one. `keymap` are the person's own keys."""

    def __init__(
        self,
        owner: DOMNode,
        *,
        daemon: Daemon,
        base_url: str,
        client_name: str,
        model: str,
        history: History,
        clock: Callable[[], float],
        can_start: bool = False,
        is_replay: bool = False,
        keymap: Mapping[str, str] | None = None,
    ) -> None:
        self.keymap = keymap or {}
        self.can_start = can_start
        self.is_replay = is_replay
        self.history = history
        self.clock = clock
        self.daemon = daemon
        self.base_url = base_url
        self.client_name = client_name
        self.model = model
        self.snapshot: Snapshot | None = None
        self.trouble: str | None = None
        self.rates = RateSeries()
        self.request_rates = RequestRates()
        self.recorder: Recorder | None = None
        self.pulls = Pulls(daemon, self._pull_ended)
        self.snapshots: Signal[Snapshot] = Signal(owner, "snapshots")
        self.connection: Signal[str | None] = Signal(owner, "connection")
        self.models: Signal[str] = Signal(owner, "models")
        self.pulled: Signal[tuple[str, str | None]] = Signal(owner, "pulled")
        self.deleted: Signal[int] = Signal(owner, "deleted")
        self.deleted_chats: list[Deleted] = []
        self.recording_failed: Signal[str] = Signal(owner, "recording_failed")

    def key(self, name: str) -> str:
        """A key of the table, as it is with the person's own keys."""
        return key_of(name, self.keymap)

    def take(self, snapshot: Snapshot) -> None:
        """Keeps a snapshot and tells whoever shows it."""
        self.snapshot = snapshot
        aggregate = snapshot.aggregate
        self.rates.add(Sample(snapshot.time_s, aggregate.decode_tokens_per_s, aggregate.prefill_tokens_per_s))
        self.request_rates.add(snapshot)
        if self.recorder is not None:
            self._record(self.recorder, snapshot)
        if self.trouble is not None:
            self.trouble = None
            self.connection.publish(None)
        self.snapshots.publish(snapshot)

    def _pull_ended(self, model: str, problem: str | None) -> None:
        self.pulled.publish((model, problem))

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

    def _record(self, recorder: Recorder, snapshot: Snapshot) -> None:
        try:
            recorder.write(snapshot)
        except OSError as error:
            self.stop_recording()
            self.recording_failed.publish(error.strerror or str(error))

    def lose(self, reason: str) -> None:
        """The event stream ended. What was known stays, marked as old by `trouble`."""
        self.trouble = reason
        self.connection.publish(reason)

    def choose(self, model: str) -> None:
        """Chats go to this model from now on."""
        self.model = model
        self.models.publish(model)

    def engine_of(self, model: str) -> EngineRow | None:
        """The engine that serves a model, by the model's canonical name."""
        engines = self.snapshot.engines if self.snapshot else []
        return next((engine for engine in engines if engine.model == model), None)
