"""One server: what it says of itself before it is measured, then workloads run against it one after the other; and what
every workload has around its own part: connecting, the outcome of all requests, and an end by Ctrl-C.

Runs in the main thread: each run has an event loop of its own, and Ctrl-C ends the run that is going, whose finished
requests still count.

Does not: compare servers, or print.
"""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import secrets
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from localrun.access import trust
from localrun.bench.metrics import outcomes, stream_metrics
from localrun.bench.results import Metrics, Options, Parameter, RunResult, Target, Workload
from localrun.bench.servers import ServerFlags, ServerProcess, local_server
from localrun.bench.streams import CUT_SHORT, Endpoint
from localrun.errors import BadRequest, DaemonUnreachable
from localrun.snapshot import EngineRow

# --- what a server says of itself: the model to ask for, and how much it holds ---

TIMEOUT_S = 10.0
MAX_BODY_BYTES = 4 * 1024 * 1024
BUILT_IN = "tiny"

T = TypeVar("T")


class LoadedModel(NamedTuple):
    """Of one model, loaded by a localrun daemon."""

    slots: int
    kv_cells: int
    context_tokens: int
    backend: str


def base_url_of(text: str) -> str:
    """What a person gives as the address of a server, without `/v1` at its end. Raises BadRequest if it is not HTTP."""
    url = text if "://" in text else f"http://{text}"
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise BadRequest(f"{text} is not an address that can be measured; give one such as http://127.0.0.1:8080")
    return url.rstrip("/").removesuffix("/v1")


def model_of(base_url: str) -> str | None:
    """The only model that `/v1/models` lists, else the built-in one if it is among them, else None."""
    listed = _get(base_url, "/v1/models", _Models)
    names = [each.id for each in listed.data] if listed is not None else []
    if len(names) == 1:
        return names[0]
    return next((name for name in names if name.partition(":")[0] == BUILT_IN), None)


def holds_of(base_url: str, model: str) -> LoadedModel | None:
    """What a localrun daemon gives this model, or its only model, in a cluster on all nodes together; None when it is
    not loaded, or not localrun's."""
    snapshot = _get(base_url, "/localrun/v1/snapshot", _Snapshot)
    engines = snapshot.engines if snapshot is not None else []
    ours = [engine for engine in engines if engine.model == model] or engines
    are_replicas = len({engine.model for engine in ours}) == 1 and all(engine.replica for engine in ours)
    if len(ours) != 1 and not are_replicas:
        return None
    n_slots, n_cells = sum(engine.slots for engine in ours), sum(engine.kv_cells for engine in ours)
    return LoadedModel(n_slots, n_cells, ours[0].n_ctx, ours[0].backend)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Snapshot(msgspec.Struct):
    engines: list[EngineRow]


def _get(base_url: str, path: str, kind: type[T]) -> T | None:
    where = trust.endpoint_of(base_url)
    connection = trust.http_connection(where, TIMEOUT_S)
    try:
        connection.connect()
    except ssl.SSLCertVerificationError:
        raise trust.untrusted(where) from None
    except OSError as error:
        raise DaemonUnreachable(f"nothing answers at {base_url}: {error}") from error
    try:
        path = urlsplit(base_url).path.rstrip("/") + path
        connection.request("GET", path, headers=trust.headers_for(where))
        response = connection.getresponse()
        body = response.read(MAX_BODY_BYTES)
        return msgspec.json.decode(body, type=kind) if response.status == 200 else None
    except (OSError, http.client.HTTPException, msgspec.DecodeError):
        return None
    finally:
        connection.close()


def random_seed() -> int:
    """A seed that no server has seen, so that cold prompts are cold."""
    return secrets.randbelow(2**31)


@dataclasses.dataclass(frozen=True)
class Session:
    """What is measured, how, and `server`, where it is our own: it can be restarted and its memory is known."""

    target: Target
    options: Options
    server: ServerProcess | None = None

    def run(self, workloads: Sequence[Workload], rounds: int, on_result: Callable[[RunResult], None]) -> bool:
        """Every workload, then every workload again, `rounds` times, each run with prompts of its own.

        Every result goes to `on_result` as soon as it is there. False when Ctrl-C ended it before its time. Raises
        what `Workload.run` raises.
        """
        options = self.options
        if self.server is not None:
            options = dataclasses.replace(options, restart=self._restart)
        for index, workload in enumerate([*workloads] * rounds):
            target = self.target if self.server is None else self.server.target
            result = asyncio.run(workload.run(target, dataclasses.replace(options, seed=options.seed + index)))
            was_interrupted = result.note == INTERRUPTED
            # Ctrl-C reaches our server, too: it may be gone already.
            if self.server is not None and not was_interrupted:
                result.metrics["rss_bytes"] = float(self.server.rss_bytes())
            on_result(result)
            if was_interrupted:
                return False
        return True

    async def _restart(self, _target: Target) -> Target:
        assert self.server is not None
        await asyncio.to_thread(self.server.restart)
        return self.server.target


@contextmanager
def own_server(model: Path, *, slots: int, kv_cells: int, threads: int, latency: str) -> Iterator[ServerProcess]:
    """A daemon of our own with a temporary home."""
    with tempfile.TemporaryDirectory(prefix="localrun-bench-") as folder:
        flags = ServerFlags(model=model, slots=slots, kv_cells=kv_cells, threads=threads, latency=latency)
        with local_server(flags, Path(folder)) as server:
            yield server


# --- around a workload ---

INTERRUPTED = "interrupted"


@dataclass
class WorkloadResult:
    """What a workload's own part returns. `parameters` are the sizes that it used."""

    metrics: Metrics
    parameters: dict[str, Parameter] = field(default_factory=dict)
    note: str = ""


def define(
    name: str,
    summary: str,
    headline: tuple[str, ...],
    measure: Callable[[Endpoint, Options], Awaitable[WorkloadResult]],
    *,
    overloads: bool = False,
) -> Workload:
    """A Workload whose own part is `measure`. When that is cancelled the result has what the finished requests say, and
    INTERRUPTED as its note."""

    async def run(target: Target, options: Options) -> RunResult:
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        endpoint = Endpoint(target, options)
        try:
            await endpoint.connect()
            measured = await measure(endpoint, options)
        except asyncio.CancelledError:
            await endpoint.cut_all()
            measured = WorkloadResult(stream_metrics("", endpoint.records), note=INTERRUPTED)
        return RunResult(
            workload=name,
            target=endpoint.target,
            parameters={"seed": options.seed, "wording": endpoint.wording.value, **measured.parameters},
            metrics=measured.metrics | outcomes("", endpoint.records, ignoring=CUT_SHORT),
            records=endpoint.records,
            note=measured.note,
            started_at=started_at,
        )

    return Workload(name, summary, run, headline, overloads)
