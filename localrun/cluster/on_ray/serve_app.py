"""A replica as Ray Serve starts it: one engine of this node's, and the port for doors (`replica.py`).

Serve places it, starts another one when it is gone, and ends it. No request passes Serve: doors come to the port, which
`report` tells to whoever asks all replicas, and no slot of Serve's is held for them. So a replica that is to end waits
by itself for what runs here, up to `LINGER_S`; what is left then goes on elsewhere.

Runs in a process of Ray's, in the event loop that Serve has for code such as this; not in the main thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from localrun import ollama_environment, wire
from localrun.cluster import settings as kept
from localrun.cluster.affinity import pick
from localrun.cluster.catalogue import adapters_of, at_hand, neighbours
from localrun.cluster.description import Description, Has, described
from localrun.cluster.on_ray.nodes import MARK
from localrun.cluster.replica import Replica
from localrun.cluster.reports import ReplicaReport
from localrun.cluster.view import Reporter
from localrun.config import LoadSettings, folders
from localrun.errors import LocalrunError
from localrun.hardware import kernels, thread_choice
from localrun.models.storage.store import Store
from localrun.server.engines.link import ENGINE_COMMAND, EngineLink
from localrun.server.engines.resident import EngineLease, use_of
from localrun.server.engines.supervisor import Supervisor

DEPLOYMENT = "Engine"
# Answers are long.
LINGER_S = 600
# A replica whose engine does not come back for so long is started anew, maybe elsewhere.
NO_ENGINE_S = 120.0


class Engine:
    """See the module. `said` is a `Description` in JSON."""

    command: Sequence[str] = ENGINE_COMMAND

    async def __init__(self, said: str) -> None:  # type: ignore[misc] # as Serve has it
        # Ray's own limit, for libraries that would take all processors; engines know how many threads they want.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._description = msgspec.json.decode(said, type=Description)
        try:
            await self._open()
        except (LocalrunError, OSError, ValueError) as error:
            raise RuntimeError(f"{MARK}{error}") from None

    async def _open(self) -> None:
        self._member = kept.membership()
        settings = msgspec.structs.replace(ollama_environment.load(), keep_alive_s=-1)
        own = folders()
        store, said = Store.of(settings), self._description
        model = await at_hand(store, said, neighbours(self._member, await asyncio.to_thread(self._others)))
        media = kept.temp_folder().parent / "media"
        media.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_llama = self.command == ENGINE_COMMAND

        async def borrow() -> EngineLease:
            return await self._supervisor.acquire(model.name, -1, use_of(model.header), said.load)

        self._replica = Replica(
            borrow, token=kept.frames_token(), app=said.fingerprint, media_root=media,
            adapters=await asyncio.to_thread(adapters_of, store, said, model),
        )  # fmt: skip
        self._supervisor = Supervisor(
            settings, store, command=self.command, on_step=self._on_step, on_loaded=lambda link: None,
            on_ended=self._replica.on_ended, threads_file=own.cache / thread_choice.FILE_NAME,
            kernels_folder=kernels.folder(own.cache) if is_llama else None,
        )  # fmt: skip
        self._reporter = Reporter(self._supervisor.loaded)
        self._had_engine_at_s = time.monotonic()
        self._supervisor.start()
        try:
            self._port = await self._replica.start(self._member.address, tls=self._member.tls_to_listen())
        except BaseException:
            await self._supervisor.stop()
            raise

    def _others(self) -> list[str]:
        """Where the other nodes give their files."""
        nodes = [node for node in ray.nodes() if node["Alive"] and node.get("NodeName") != self._member.node]
        ports = [(node["NodeManagerAddress"], Has.of(node.get("Labels", {})).files_port) for node in nodes]
        return [f"{address}:{port}" for address, port in ports if port]

    def reconfigure(self, said: dict[str, object]) -> None:
        """By Serve, with the description that `__init__` was given: it is there for whoever asks Serve what it runs."""

    async def report(self, to_follower: bool = False) -> bytes:
        """A `ReplicaReport` in msgpack."""
        said = ReplicaReport(
            id=serve.get_replica_context().replica_id.unique_id, node=self._member.node, host=self._member.address,
            port=self._port, pid=os.getpid(), fingerprint=self._description.fingerprint,
        )  # fmt: skip
        try:
            link = self._replica.link
        except LocalrunError:
            return msgspec.msgpack.encode(msgspec.structs.replace(said, why_not=self._replica.why_not))
        now = msgspec.structs.replace(
            self._reporter.said(said, link), work_tokens=self._replica.work_tokens,
            recent=self._replica.recent if to_follower else b"", wait_s=link.longest_wait_s(time.monotonic()),
        )  # fmt: skip
        return msgspec.msgpack.encode(now)

    async def check_health(self) -> None:
        """By Serve, now and then. Raises RuntimeError for a replica that is of no use."""
        try:
            assert self._replica.link is not None
            self._had_engine_at_s = time.monotonic()
        except LocalrunError as error:
            if time.monotonic() - self._had_engine_at_s > NO_ENGINE_S:
                raise RuntimeError(f"{MARK}{error.message}") from None

    async def __del__(self) -> None:
        """By Serve, before it ends the process: doors have been told to go elsewhere."""
        if not hasattr(self, "_port"):
            return
        until_s = time.monotonic() + LINGER_S
        while self._replica.n_requests and time.monotonic() < until_s:  # noqa: ASYNC110 - rare
            await asyncio.sleep(0.2)
        await self._replica.stop()
        await self._supervisor.stop()

    def _on_step(self, link: EngineLink, step: wire.Step) -> None:
        self._replica.on_step(link, step)
        self._reporter.on_step(link, step)


class PrefixRouter(RequestRouter):  # type: ignore[misc] # Ray's classes have no types
    """Serve's choice of a replica, for whoever asks through a handle: by the rule of `affinity.py`, among those that
    Serve knows to live and to take requests, as soon as its controller does. What is called without a prompt may go
    anywhere.

    What the prompt costs at each replica the door says, which knows where the prompt's beginning was computed; so a
    router remembers nothing, and one that is new chooses as any other. Serve takes the class to other processes by
    value. Does not: ask anybody, or wait.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        asked = {} if pending_request is None else pending_request.kwargs
        there = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        costs = {name: cost for name, cost in asked.get("costs", {}).items() if name in there}
        if not costs:
            return [candidate_replicas]
        chosen = pick(asked["first"], costs)
        return [[there[chosen]], [there[name] for name in costs if name != chosen]]


def build(description: Description, n_replicas: int, engine: type[Engine] = Engine) -> serve.Application:
    """The app, for Serve to run."""
    n_gpus = description.n_gpus
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=n_replicas,
        ray_actor_options={"num_cpus": 0 if n_gpus else 1, "num_gpus": n_gpus},
        # Replicas without GPUs would share one machine's memory bandwidth, and gain nothing.
        **({} if n_gpus else {"max_replicas_per_node": 1}),
        # What is asked of all replicas is answered beside everything else.
        max_ongoing_requests=1000,
        max_constructor_retry_count=3,
        health_check_period_s=2,
        health_check_timeout_s=5,
        graceful_shutdown_timeout_s=LINGER_S + 30,
        graceful_shutdown_wait_loop_s=0.5,
        user_config=msgspec.to_builtins(description),
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    )(engine)
    # Between what is the same to replicas Serve changes numbers, and starts none anew.
    version = f"{description.fingerprint[:16]}-{n_gpus:g}"
    return deployment.options(_internal=True, version=version).bind(msgspec.json.encode(description).decode())


def app(args: dict[str, str]) -> serve.Application:
    """For a config file of Serve's, as KubeRay has it: the options of `localrun cluster deploy`. Raises LocalrunError,
    and msgspec.ValidationError."""
    asked = msgspec.convert(args, _Args, strict=False)
    store = Store.of(ollama_environment.load())
    load = LoadSettings(slots=asked.slots, num_ctx=asked.num_ctx)
    return build(described(store, asked.model, load, asked.gpus), asked.replicas)


class _Args(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    replicas: Annotated[int, msgspec.Meta(ge=1)] = 1
    gpus: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    slots: Annotated[int, msgspec.Meta(ge=1)] | None = None
    num_ctx: Annotated[int, msgspec.Meta(ge=1)] | None = None
