"""What a door shows of the cluster: a row for each replica, what the nodes have done in all, and what happened lately.

A replica says once a second what its engine's row is (`Reporter`), which every door hears; a door that has requests
there knows more from its own link, step by step. Where neither is heard, the row's state is unknown.

Runs in the event loop of a door, or of a replica. Rows are made when somebody looks; a report costs a door some
additions. Does not: know the requests of other doors, only how many each replica has.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from localrun import stored, wire
from localrun.cluster.reports import AppReport, ClusterReport, Event, NodeReport, ReplicaReport
from localrun.config import folders
from localrun.server.engines import machine
from localrun.server.engines.link import EngineLink
from localrun.server.engines.resident import show_last_step
from localrun.server.jobs.generation import RateWindow
from localrun.snapshot import NODE_TOTALS, EngineRow

# A report is due every second; one may be late.
SILENCE_S = 5.0
# A replica that has not answered for so long is gone.
GONE_S = 3.0
KEPT_EVENTS = 10
# Replicas whose last row is known, so that one that comes back is not counted twice.
MAX_COUNTED = 1000
UNKNOWN = "unknown"
# Whose cells they are, where it is nobody else's business.
SOMEBODY = "other"

_log = logging.getLogger(__name__)
_events: msgspec.json.Decoder[tuple[Event, ...]] = msgspec.json.Decoder(tuple[Event, ...])


class Reporter:
    """A replica's half. `rows` are its supervisor's, of which one is the engine's."""

    def __init__(self, rows: Callable[[], list[EngineRow]]) -> None:
        self._rows = rows
        self._decode, self._prefill = RateWindow(), RateWindow()
        self._link: EngineLink | None = None
        self._n_output = self._n_prefill = 0

    def on_step(self, link: EngineLink, step: wire.Step) -> None:
        stats = step.stats
        if link is not self._link:
            self._link, self._n_output, self._n_prefill = link, 0, 0
        if n_output := sum(len(delta.tokens) for delta in step.deltas):
            self._n_output += n_output
            self._decode.add(step.sent_at_s, stats.step_s, n_output)
        if n_prefill := stats.prefill_tokens_total - self._n_prefill:
            self._n_prefill = stats.prefill_tokens_total
            self._prefill.add(step.sent_at_s, stats.background_s or stats.step_s, n_prefill)

    def said(self, report: ReplicaReport, link: EngineLink) -> ReplicaReport:
        """The report with what the engine does now."""
        now_s = time.monotonic()
        row = next((row for row in self._rows() if row.pid == link.pid), None)
        if row is None:
            return report
        row.node, row.replica = report.node, report.id
        row.rss_bytes = None if row.pid is None else machine.rss_bytes(row.pid)
        row.tokens_per_s, row.prefill_tokens_per_s = self._decode.per_s(now_s), self._prefill.per_s(now_s)
        row.output_tokens_total = self._n_output if link is self._link else 0
        row.kv_runs = [msgspec.structs.replace(run, request=run.request and SOMEBODY) for run in row.kv_runs]
        return msgspec.structs.replace(
            report, row=row, n_slots=row.slots, n_running=row.slots_busy, n_queued=row.queued,
            tokens_per_s=row.tokens_per_s,
        )  # fmt: skip


class View:
    """A door's half. `links` are its own to the replicas of a model, by replica. `is_counted_here`: this daemon's
    `/metrics` tells what replicas do."""

    def __init__(self, node: str, links: Callable[[str], Mapping[str, EngineLink]], *, is_counted_here: bool) -> None:
        self.node, self.is_counted_here = node, is_counted_here
        self._links = links
        self._report = ClusterReport(nodes=(), apps=())
        self._told_at_s = -math.inf
        self._totals: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self._counted: dict[str, EngineRow] = {}  # by replica
        self._history = History()

    def told(self, report: ClusterReport) -> None:
        """What the bridge says, every second."""
        self._report, self._told_at_s = report, time.monotonic()
        if self.is_counted_here:
            self._count(report)
        self._history.told(report, self._told_at_s)

    def rows(self) -> list[EngineRow]:
        """One for each replica."""
        return [self._row(app, one) for app in self._report.apps for one in app.replicas]

    def link_of(self, row: EngineRow) -> EngineLink | None:
        return self._links(row.model).get(row.replica)

    def runs(self, name: str) -> bool:
        """Whether the cluster is to run a model of this name."""
        name = name.removesuffix(":latest")
        return any(app.description.model.removesuffix(":latest") == name for app in self._report.apps)

    def totals(self) -> Mapping[tuple[str, str], Mapping[str, int]]:
        """By model and node, since this door was started; the fields of `NODE_TOTALS`."""
        return self._totals

    # --- inside --------------------------------------------------------------------------------------------------

    def _row(self, app: AppReport, one: ReplicaReport) -> EngineRow:
        name = app.description.model
        row = EngineRow(model=name, pid=None, state="loading") if one.row is None else msgspec.structs.replace(one.row)
        row.model, row.name, row.node, row.replica = name, row.name or name, one.node, one.id
        link = self.link_of(row)
        if link is not None and link.error is None:
            row.state = "ready"  # whoever is silent for some seconds is left
            if link.last_frame_s > self._told_at_s:
                show_last_step(row, link)
        elif time.monotonic() - self._told_at_s > SILENCE_S:
            row.state, row.slots_busy, row.queued = UNKNOWN, 0, 0
            row.tokens_per_s = row.prefill_tokens_per_s = 0.0
        elif one.why_not:
            row.state = "loading"
        return row

    def _count(self, report: ClusterReport) -> None:
        """What a replica had done when it was first heard of does not count, so that nothing does twice; an engine that
        it starts anew counts from 0, and one that is gone has done what it has."""
        for app in report.apps:
            for one in app.replicas:
                if one.row is None:
                    continue
                before = self._counted.pop(one.id, one.row)
                self._counted[one.id] = one.row
                place = self._totals[app.description.model, one.node]
                for field, _ in NODE_TOTALS.values():
                    n_before = getattr(before, field) if before.pid == one.row.pid else 0
                    place[field] += max(0, getattr(one.row, field) - n_before)
        for oldest in list(self._counted)[:-MAX_COUNTED]:
            del self._counted[oldest]
        models = {app.description.model for app in report.apps}
        for place_gone in [key for key in self._totals if key[0] not in models]:
            del self._totals[place_gone]


def events_file() -> Path:
    return folders().state / "cluster-events.json"


def kept_events() -> tuple[Event, ...]:
    """The last ones that a door on this machine has seen, oldest first."""
    return stored.read(events_file(), _events) or ()


class History:
    """The last events in words, in the log and in a file: each door keeps its own."""

    def __init__(self) -> None:
        self.events = self._written = kept_events()
        self._lock = threading.Lock()
        self._nodes: dict[str, NodeReport] = {}
        self._apps: dict[str, AppReport] = {}
        # Replicas with an engine: the model, what they said, and when that was.
        self._ready: dict[str, tuple[str, ReplicaReport, float]] = {}

    def told(self, report: ClusterReport, now_s: float) -> None:
        if not report.nodes:  # the head has not answered yet
            return
        is_first = not self._nodes
        nodes = {node.id: node for node in report.nodes if node.state != "dead"}
        apps = {app.description.model: app for app in report.apps}
        said = [*self._of_nodes(nodes), *self._of_apps(apps), *self._of_replicas(nodes, apps, now_s)]
        self._nodes, self._apps = nodes, apps
        if said and not is_first:
            for text in said:
                _log.info("%s", text)
            self.events = (*self.events, *(Event(time.time(), text) for text in said))[-KEPT_EVENTS:]
            asyncio.get_running_loop().run_in_executor(None, self._keep)

    def _keep(self) -> None:
        """In a thread."""
        with self._lock:
            if self._written is self.events:
                return
            self._written = self.events
            try:
                stored.write(events_file(), self._written)
            except OSError as error:
                _log.warning("what happened in the cluster is not kept: %s", error)

    def _of_nodes(self, nodes: Mapping[str, NodeReport]) -> Iterator[str]:
        for name, node in nodes.items():
            before = self._nodes.get(name)
            if before is None:
                yield f"node {node.node} joined"
            elif node.state != before.state:
                yield f"node {node.node} is {node.state}"
        for name in set(self._nodes) - set(nodes):
            yield f"node {self._nodes[name].node} is gone"

    def _of_apps(self, apps: Mapping[str, AppReport]) -> Iterator[str]:
        for model, app in apps.items():
            before = self._apps.get(model)
            if before is None or before.n_wanted != app.n_wanted:
                instead = "" if before is None else f" instead of {before.n_wanted}"
                yield f"{model} is to have {app.n_wanted} replica{'s' * (app.n_wanted != 1)}{instead}"
        for model in set(self._apps) - set(apps):
            yield f"{model} is not run any more"

    def _of_replicas(
        self, nodes: Mapping[str, NodeReport], apps: Mapping[str, AppReport], now_s: float
    ) -> Iterator[str]:
        """One that is not heard of once may only have been slow to answer."""
        all_of_them = [(model, one) for model, app in apps.items() for one in app.replicas]
        why_not = {one.id: one.why_not for _, one in all_of_them}
        for model, one in all_of_them:
            if not one.why_not:
                if one.id not in self._ready:
                    yield f"{model} runs on {one.node}"
                self._ready[one.id] = model, one, now_s
        for name, (model, one, heard_at_s) in list(self._ready.items()):
            if why_not.get(name):
                yield f"{model} on {one.node} has lost its engine: {why_not[name].partition('; the next')[0]}"
            elif name in why_not or now_s - heard_at_s < GONE_S:
                continue
            elif model in apps:
                draining = {node.node for node in nodes.values() if node.state != "alive"}
                app = apps[model]
                is_wanted = app.n_ready < app.n_wanted and one.fingerprint == app.description.fingerprint
                yield f"{model} on {one.node} {'is lost' if is_wanted and one.node not in draining else 'has ended'}"
            del self._ready[name]
