"""The process that talks to Ray for a door, or for one command: `python -m localrun.cluster.on_ray.bridge`, with what
`reports.py` says on its pipes.

It says which replicas there are, and corrects a door's choice among them (`PrefixRouter` of `serve_app.py`), for which
no request waits long: the door chooses by itself as well (`link.py`). When the head is lost, replicas are still asked
and chosen, which needs no head; what the head alone knows is then as it was last. The bridge of the head's door is the
one that scales.

Ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec
import ray
from ray import serve
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import RayServeException

from localrun import framing, ollama_environment
from localrun.cluster import ledger, reports, settings
from localrun.cluster.catalogue import check_fits
from localrun.cluster.description import Description, Has, Load, Scaler, app_name
from localrun.cluster.on_ray.nodes import MARK
from localrun.cluster.on_ray.serve_app import DEPLOYMENT, Engine, build
from localrun.errors import LocalrunError, NotFound, Unavailable

EVERY_S = 1.0
ANSWER_S = 3.0
# A choice that takes so long is of no use to anybody.
CHOICE_S = 1.0
# A controller that ends meanwhile never answers.
SCALE_S = 10.0
FIRST_ANSWER_S = 60.0
# Of Serve, for an app whose first replicas could not be started.
DEPLOY_FAILED = "deploy_failed"
# A busy one may take some of those.
HEAD_TRIES = 10

_log = logging.getLogger(__name__)


class Bridge:
    """See the module."""

    def __init__(self, engine: type[Engine] = Engine) -> None:
        self._engine = engine
        self._nodes: tuple[reports.NodeReport, ...] = ()
        self._apps: dict[str, reports.AppReport] = {}  # as Serve's controller knows them, by the app's name
        self._asking: asyncio.Future[None] | None = None
        self._handles: dict[str, Any] = {}
        self._replicas: dict[str, tuple[reports.ReplicaReport, ...]] = {}  # as they answered last
        self.is_following = False
        self._scalers: defaultdict[str, Scaler] = defaultdict(Scaler)

    async def look(self) -> reports.ClusterReport:
        """What there is."""
        await self._ask_head()
        replicas = await asyncio.gather(*(self._ask_replicas(app) for app in self._apps))
        apps = (
            msgspec.structs.replace(app, replicas=found)
            for app, found in zip(self._apps.values(), replicas, strict=True)
        )
        return reports.ClusterReport(nodes=self._nodes, apps=tuple(apps))

    async def deploy(self, asked: reports.Deploy) -> None:
        """Tells Serve; what comes of it is to be looked at. Raises CannotFit and Unavailable."""
        await self._hear_head()
        there, scale = self._apps.get(asked.description.app), asked.description.scale
        n_replicas = (
            asked.n_replicas if scale is None else scale.within(asked.n_replicas if there is None else there.n_wanted)
        )
        alive = [(node.node, node.has) for node in self._nodes if node.state == "alive"]
        await asyncio.to_thread(check_fits, asked.description, ollama_environment.load(), alive)
        if there is not None and there.state == DEPLOY_FAILED:  # Serve would take it for the same, and not try again
            await asyncio.to_thread(serve.delete, asked.description.app)
        elif there is not None and there.description == asked.description:
            await asyncio.to_thread(_scale, asked.description.app, n_replicas)
            return
        await asyncio.to_thread(_run, build(asked.description, max(1, n_replicas), self._engine), asked.description.app)

    async def choose(self, asked: reports.Choose) -> reports.Chosen:
        """Which replica computes a prompt, as Serve's router has it."""
        with contextlib.suppress(TimeoutError, RayServeException, ray.exceptions.RayError):
            async with (
                asyncio.timeout(CHOICE_S),
                self._handle(asked.app).choose_replica(first=asked.first, costs=asked.costs, _reserve=False) as chosen,
            ):
                return reports.Chosen(asked.id, str(chosen.replica_id))
        return reports.Chosen(asked.id, "")

    async def wake(self, name: str) -> None:
        """One replica of an app that was scaled to none."""
        app = self._apps.get(name)
        if app is not None and app.n_wanted == 0 and app.description.scale is not None:
            self._apps[name] = msgspec.structs.replace(app, n_wanted=1)  # until the head is asked again
            await _try_to_scale(name, 1)

    async def scale(self, report: reports.ClusterReport) -> None:
        """As many replicas as the work that waits asks for."""
        for app in report.apps:
            if app.description.scale is None or not app.n_wanted:
                continue
            loads = [
                Load(one.n_slots, one.n_running, one.n_queued, one.wait_s) for one in app.replicas if not one.why_not
            ]
            name = app.description.app
            n = self._scalers[name].wanted(app.description.scale, app.n_wanted, loads, time.monotonic())
            if n != app.n_wanted:
                _log.warning("'%s' gets %d replicas instead of %d", app.description.model, n, app.n_wanted)
                await _try_to_scale(name, n)

    async def undeploy(self, model: str) -> None:
        """Raises NotFound."""
        await self._hear_head()
        app = app_name(model)
        if app not in self._apps:
            names = ", ".join(f"'{one.description.model}'" for one in self._apps.values()) or "nothing"
            raise NotFound(f"the cluster does not run '{model}'; it runs {names}")
        await asyncio.to_thread(serve.delete, app, _blocking=False)

    async def drain(self, asked: reports.Drain) -> None:
        """Raises NotFound, and Unavailable when Ray refuses."""
        await self._hear_head()
        node = next((one for one in self._nodes if asked.node in (one.node, one.id) and one.state != "dead"), None)
        if node is None:
            names = ", ".join(one.node for one in self._nodes if one.state != "dead")
            raise NotFound(f"there is no node '{asked.node}'; there are {names}")
        await asyncio.to_thread(_drain, node.id, asked.deadline_s)

    # --- inside --------------------------------------------------------------------------------------------------

    async def _hear_head(self) -> None:
        """For what depends on the answer. Raises Unavailable."""
        for _ in range(HEAD_TRIES):
            if await self._ask_head():
                return
        raise Unavailable("the cluster's head does not answer; try again")

    async def _ask_head(self) -> bool:
        """Takes what it answers in time, and whether it does. One question at a time: a lost head answers none. The
        first answer is waited for, since without it there would seem to be nothing. Raises Unavailable."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(asyncio.to_thread(self._take))
        if not self._nodes:
            try:
                await asyncio.wait_for(asyncio.shield(self._asking), FIRST_ANSWER_S)
            except TimeoutError:
                raise Unavailable(f"the cluster's head has not answered for {FIRST_ANSWER_S:g} s") from None
            return True
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError, RayServeException):
            await asyncio.wait_for(asyncio.shield(self._asking), ANSWER_S)
            return True
        return False

    def _take(self) -> None:
        """In a thread."""
        apps = _apps()
        self._nodes, self._apps = _nodes(), apps

    async def _ask_replicas(self, app: str) -> tuple[reports.ReplicaReport, ...]:
        """Those of whom Serve says that they run, as they are now, or else as they were last."""
        try:
            answers = self._handle(app).broadcast("report", self.is_following)
            said = await answers.results_async(timeout_s=ANSWER_S, return_exceptions=True)
            found = tuple(
                msgspec.msgpack.decode(one, type=reports.ReplicaReport) for one in said if isinstance(one, bytes)
            )
        except (RayServeException, ray.exceptions.RayError):  # none runs
            found = ()
        except TimeoutError:  # one hangs
            found = self._replicas.get(app, ())
        self._replicas[app] = found
        return found

    def _handle(self, app: str) -> Any:
        if app not in self._handles:
            self._handles[app] = serve.get_deployment_handle(DEPLOYMENT, app)
        return self._handles[app]


def _nodes() -> tuple[reports.NodeReport, ...]:
    draining = ray._private.state.state.get_draining_nodes()
    found = []
    for node in ray.nodes():
        state = "dead" if not node["Alive"] else "draining" if node["NodeID"] in draining else "alive"
        has = node.get("Resources", {})
        found.append(
            reports.NodeReport(
                node=node.get("NodeName") or node["NodeManagerAddress"], id=node["NodeID"],
                address=node["NodeManagerAddress"], state=state, n_cpus=has.get("CPU", 0.0),
                is_head="node:__internal_head__" in has,
                n_gpus=has.get("GPU", 0.0), has=Has.of(node.get("Labels", {})),
            )
        )  # fmt: skip
    return tuple(found)


def _apps() -> dict[str, reports.AppReport]:
    """Of apps whose deployment Serve has begun."""
    client = serve.context._get_global_client(raise_if_no_controller_running=False)
    found: dict[str, reports.AppReport] = {}
    applications = {} if client is None else client.get_serve_details().get("applications", {})
    for name, app in applications.items():
        deployment = app["deployments"].get(DEPLOYMENT)
        if deployment is None or app["status"] == "DELETING":
            continue
        said = deployment["deployment_config"]["user_config"]
        message = deployment["message"] or app["message"]
        found[name] = reports.AppReport(
            description=msgspec.convert(said, Description), n_wanted=deployment["target_num_replicas"],
            state=str(getattr(app["status"], "value", app["status"])).lower(), message=_in_short(message),
        )  # fmt: skip
    return found


def _in_short(message: str) -> str:
    """Serve's words on a failed start hold a traceback; ours are in it, or else its last line says most."""
    ours = re.search(re.escape(MARK) + r"(.*)", message)
    return ours[1] if ours else message.strip().rpartition("\n")[2]


def _run(app: serve.Application, name: str) -> None:
    serve.start(proxy_location=ProxyLocation.Disabled)
    target = serve.RunTarget(target=app, name=name, route_prefix=None, external_scaler_enabled=True)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _scale(app: str, n_replicas: int) -> None:
    """Running replicas stay as they are: deploying the same again would start all of them anew."""
    client = serve.context._get_global_client()
    deployment = ray.serve._private.common.DeploymentID(name=DEPLOYMENT, app_name=app)
    ray.get(client._controller.update_deployment_replicas.remote(deployment, n_replicas), timeout=SCALE_S)


async def _try_to_scale(app: str, n_replicas: int) -> None:
    """If the controller is there, and knows the app; whoever wants it looks again."""
    with contextlib.suppress(ray.exceptions.RayError, RayServeException, ValueError):
        await asyncio.to_thread(_scale, app, n_replicas)


def _drain(node_id: str, deadline_s: int) -> None:
    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    until_ms = int((time.time() + deadline_s) * 1000)
    # The other reason, idleness, is refused by a node that is busy.
    reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    is_accepted, why_not = client.drain_node(node_id, reason, "localrun cluster drain", until_ms)
    if not is_accepted:
        raise Unavailable(f"Ray refuses to drain it: {why_not}")


class _Pipes:
    """Frames of one process. Ray prints to standard output, which becomes standard error."""

    def __init__(self) -> None:
        self._out: BinaryIO = os.fdopen(os.dup(1), "wb")
        self._loop: asyncio.AbstractEventLoop
        self._take: Callable[[reports.ToBridge], None] | None = None
        os.dup2(2, 1)

    def read(self) -> reports.ToBridge:
        """Raises framing.FrameError."""
        body = framing.read_body(sys.stdin.buffer)
        if body is None:
            raise framing.FrameError("nothing was asked")
        return reports.decode_to_bridge(body)

    def hear(self, take: Callable[[reports.ToBridge], None]) -> None:
        """What is said from now on, in the running loop."""
        self._loop, self._take = asyncio.get_running_loop(), take

    def listen(self) -> None:
        """In a thread of its own, because Ray may hold the others: ends the process with standard input."""
        with contextlib.suppress(framing.FrameError):
            while True:
                asked = self.read()
                if self._take is not None:
                    self._loop.call_soon_threadsafe(self._take, asked)
        os._exit(0)

    def say(self, message: reports.FromBridge) -> None:
        self._out.write(framing.encode(message))
        self._out.flush()


async def _answer(bridge: Bridge, pipes: _Pipes, asked: reports.ToBridge) -> None:
    if isinstance(asked, reports.Follow):
        await _follow(bridge, pipes)
    elif isinstance(asked, reports.Look):
        pipes.say(await bridge.look())
    elif isinstance(asked, reports.Deploy):
        await _deployed(bridge, pipes, asked)
    elif isinstance(asked, reports.Undeploy):
        await ledger.keep(ledger.head_of(settings.membership()), app_name(asked.model), None)
        await bridge.undeploy(asked.model)
    elif isinstance(asked, reports.Drain):
        await bridge.drain(asked)
    pipes.say(reports.Done())


async def _follow(bridge: Bridge, pipes: _Pipes) -> None:
    """Reports, and answers to what is asked meanwhile."""
    tasks: set[asyncio.Task[None]] = set()

    async def answer(asked: reports.ToBridge) -> None:
        if isinstance(asked, reports.Choose):
            pipes.say(await bridge.choose(asked))
        elif isinstance(asked, reports.Wake):
            await bridge.wake(asked.app)

    def take(asked: reports.ToBridge) -> None:
        task = asyncio.create_task(answer(asked))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    pipes.hear(take)
    bridge.is_following = True
    is_head = settings.membership().is_head
    scaling: asyncio.Task[None] | None = None
    began_in = settings.session()
    while settings.session() == began_in:
        report = await bridge.look()
        pipes.say(report)
        if is_head and (scaling is None or scaling.done()):  # a lost controller does not answer
            scaling = asyncio.create_task(bridge.scale(report))
        await asyncio.sleep(EVERY_S)
    # What was known before the head's end is of no use, and Ray waits for that head at every end but this one.
    pipes.say(reports.Failed("the cluster has begun anew"))
    os._exit(0)


async def _deployed(bridge: Bridge, pipes: _Pipes, asked: reports.Deploy) -> None:
    """Until all replicas are there, or as many as there is room for. Raises Unavailable for what cannot be started."""
    await bridge.deploy(asked)
    if asked.wait_s:  # not by the head, which keeps it already
        await ledger.keep(ledger.head_of(settings.membership()), asked.description.app, asked)
    until_s = time.monotonic() + asked.wait_s
    while time.monotonic() < until_s:
        seen = await bridge.look()
        pipes.say(seen)
        app = next((one for one in seen.apps if one.description == asked.description), None)
        if app is not None and app.state in (DEPLOY_FAILED, "unhealthy"):
            raise Unavailable(f"'{asked.description.model}' cannot be run: {app.message}")
        n_nodes = sum(node.state == "alive" for node in seen.nodes)
        n_wanted = 1 if app is None else app.n_wanted
        n_most = n_wanted if asked.description.n_gpus else min(n_wanted, n_nodes)
        is_told = asked.description.scale is not None or n_wanted == asked.n_replicas
        if app is not None and is_told and n_most <= app.n_ready:
            return
        await asyncio.sleep(EVERY_S)


def main(engine: type[Engine] = Engine) -> None:
    """Another class of engines is for tests."""
    pipes = _Pipes()
    try:
        asked = pipes.read()
        threading.Thread(target=pipes.listen, daemon=True).start()
        member = settings.membership()
        ray.init(
            address=member.head, namespace="localrun", log_to_driver=False, logging_level=logging.WARNING,
            _node_ip_address=member.address,
        )  # fmt: skip
        asyncio.run(_answer(Bridge(engine), pipes, asked))
    except LocalrunError as error:
        pipes.say(reports.Failed(error.message))
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        pipes.say(reports.Failed(f"Ray does not do what it was asked: {str(error).strip().rpartition(chr(10))[2]}"))


if __name__ == "__main__":
    main()
