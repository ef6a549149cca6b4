"""The commands for several machines: `cluster up`, `join`, `deploy`, `status`, `drain` and `down`.

`up` and `join` stay in the foreground and hold this machine's part of the cluster; the others ask the cluster from any
machine that is in it.

Does not: start anything in the background, or import Ray (`cluster/on_ray` does, in processes of its own).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from localrun.cli.arguments import complete_here, load_settings
from localrun.cli.daemon import daemon_version
from localrun.cli.serve import run_daemon
from localrun.cli.text import Column, print_json, progress, say, table
from localrun.config import LoadSettings, Settings
from localrun.errors import PortBusy, Unavailable

if TYPE_CHECKING:
    from localrun.cluster.on_ray.nodes import Node
    from localrun.cluster.reports import AppReport, ClusterReport, Event, NodeReport, ReplicaReport
    from localrun.cluster.settings import Membership

END_TIMEOUT_S = 60.0
DEPLOY_WAIT_S = 600.0
DRAIN_S = 600


@click.group("cluster")
def cluster_command() -> None:
    """Run models on several machines, behind one endpoint.

    Each machine runs whole models. A request goes to the replica that has the least to compute for it, which is often
    the one that knows its beginning. When a machine is lost, its streams pause and go on on another one.

    `up` on the first machine names a file with the cluster's token. Copy it to each other machine, and `join`. Models
    come from the nodes that have them. Whoever has the token can run any program on every node. Nothing is done without
    it, and what machines say to each other is encrypted; still, Ray listens on all interfaces of a node, so let only
    the nodes reach each other there, and clients only those that take requests.

    API keys are made on the head (`localrun key`), and hold at all doors. When the head comes back, nodes join it again
    and models are deployed again.

    Not yet: draft models of single requests.

    All machines need Ray: pip install 'localrun[cluster]'.
    """


_name_option = click.option("--name", help="Name of this node (default: the machine's).")
_host_option = click.option("--host", help="Address for clients (LOCALRUN_HOST).")
_port_option = click.option("--port", type=int, help="Port for clients (LOCALRUN_PORT).")
_kuberay_option = click.option(
    "--kuberay", is_flag=True,
    help="For a pod of the KubeRay operator: answer it, and leave it to the pods' network to keep others out.",
)  # fmt: skip


@cluster_command.command("up")
@_host_option
@_port_option
@_name_option
@click.option(
    "--address", default="127.0.0.1", show_default=True, metavar="ADDRESS",
    help="This machine's address for the other nodes; that of its private network lets other machines join.",
)  # fmt: skip
@click.option("--head-port", type=click.IntRange(1, 65535), help="Port for the other nodes (default: 11433).")
@_kuberay_option
def up(
    host: str | None, port: int | None, name: str | None, address: str, head_port: int | None, kuberay: bool
) -> None:
    """Start a cluster: this machine is its head, and takes requests as `localrun serve` does, until Ctrl-C."""
    from localrun.cluster import settings as kept

    settings = load_settings({"host": host, "port": port}, serves=True)
    address = kept.own_address(address)
    member = kept.Membership(
        head=f"{address}:{head_port or kept.HEAD_PORT}", address=address, node=_named(name), is_head=True,
        is_kuberay=kuberay,
    )  # fmt: skip
    _check_free(settings)
    with _held(member, kept.own_token()):
        progress(f"other nodes join with\n  localrun cluster join {member.head} --token-file {kept.token_file()}")
        _be_a_door(settings)


@cluster_command.command("join")
@click.argument("head", metavar="HEAD[:PORT]")
@click.option(
    "--token-file", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Copy of the head's file with the cluster's token (default: RAY_AUTH_TOKEN is the token).",
)  # fmt: skip
@_name_option
@click.option(
    "--address", metavar="ADDRESS", help="This machine's address for the other nodes (default: as the head sees it)."
)
@click.option("--door", is_flag=True, help="Take requests here, too.")
@_host_option
@_port_option
@_kuberay_option
def join(
    head: str, token_file: Path | None, name: str | None, address: str | None, door: bool, host: str | None,
    port: int | None, kuberay: bool,
) -> None:  # fmt: skip
    """Give this machine's processors, GPUs and models to a cluster, until Ctrl-C.

    It gets from other nodes the models that it is to run and does not have.
    """
    from localrun.cluster import settings as kept

    if not door and (host or port):
        raise click.UsageError("--host and --port are for clients, whom only a node with --door takes")
    settings = load_settings({"host": host, "port": port}, serves=True)
    if token_file is None and "RAY_AUTH_TOKEN" not in os.environ:
        raise click.UsageError("the cluster's token is missing: give --token-file, a copy of the head's file")
    token = kept.own_token() if token_file is None else kept.read_token(token_file)
    head = kept.checked_head(head)
    address = kept.own_address(address or kept.address_towards(head))
    member = kept.Membership(
        head=head, address=address, node=_named(name), is_head=False, is_kuberay=kuberay
    )  # fmt: skip
    if door:
        _check_free(settings)
    with _held(member, token) as node:
        progress(f"this machine is '{member.node}' of the cluster of {member.head}")
        if door:
            _be_a_door(settings)
        else:
            node.wait()


@cluster_command.command("deploy")
@click.argument("model", shell_complete=complete_here)
@click.option(
    "--replicas", "n_replicas", type=click.IntRange(0, 1000),
    help="Engines in the cluster (default: 1); 0 takes the model back.",
)  # fmt: skip
@click.option(
    "--min", "least", type=click.IntRange(0, 1000),
    help="At least so many engines, up to --max by the work that waits (default: 1). With 0, the first request after "
    "ten minutes without any waits for one to start.",
)  # fmt: skip
@click.option("--max", "most", type=click.IntRange(1, 1000), help="At most so many engines, instead of --replicas.")
@click.option(
    "--gpus", "n_gpus", type=click.FloatRange(min=0), default=0.0,
    help="GPUs of each replica, or a part of one (default: none, only processors).",
)  # fmt: skip
@click.option("--slots", type=click.IntRange(1, 256), help="Requests that each replica runs at once.")
@click.option("--num-ctx", type=click.IntRange(1), help="Tokens of context of each request.")
@click.option(
    "--adapter", "adapters", multiple=True, metavar="NAME",
    help="Adapter that requests may ask for, as MODEL+NAME; several times for several (default: all here that fit).",
)  # fmt: skip
def deploy(
    model: str, n_replicas: int | None, least: int | None, most: int | None, n_gpus: float, slots: int | None,
    num_ctx: int | None, adapters: tuple[str, ...],
) -> None:  # fmt: skip
    """Run a model of this machine in the cluster.

    Without GPUs a node runs one replica of a model. Draft models of single requests do not work in a cluster.
    """
    from localrun.cluster import reports
    from localrun.cluster.description import Scale, described
    from localrun.models.storage.store import Store

    if most is None and least is not None:
        raise click.UsageError("--min is the least that --max is scaled down to; give --max as well")
    if most is not None and n_replicas is not None:
        raise click.UsageError("--replicas is a fixed number of engines; leave it out, or --min and --max")
    scale = None if most is None else Scale(1 if least is None else least, most)
    if scale is not None and scale.least > scale.most:
        raise click.UsageError(f"--min {scale.least} is more than --max {scale.most}")
    # An app that may have none begins with one, which shows that it can be run.
    n_replicas = n_replicas if n_replicas is not None else 1 if scale is None else max(1, scale.least)
    reports.require_ray()
    store = Store.of(load_settings({}))
    if n_replicas == 0:
        list(reports.ask(reports.Undeploy(model=store.meant(model).text)))
        say(f"the cluster does not run {model} any more; what runs ends in peace")
        return
    description = described(store, model, LoadSettings(slots=slots, num_ctx=num_ctx), n_gpus, adapters, scale)
    asked = reports.Deploy(description=description, n_replicas=n_replicas, wait_s=DEPLOY_WAIT_S)
    app, shown = None, ""
    for report in reports.ask(asked):
        if isinstance(report, reports.ClusterReport):
            app = next((one for one in report.apps if one.description == description), None)
            line = "" if app is None else f"{app.n_ready} of {app.n_wanted} replicas of {description.model} are ready"
            if line and line != shown:
                progress(line)
            shown = line
    if app is None or app.n_ready == 0 < app.n_wanted:
        raise Unavailable(f"no replica of '{description.model}' is ready after {DEPLOY_WAIT_S:g} s; "
                          f"`localrun cluster status` shows what happens")  # fmt: skip
    missing = "" if app.n_ready >= app.n_wanted else "; further ones start when there are nodes for them"
    say(f"the cluster runs {description.model}{missing}")


@cluster_command.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def status(as_json: bool) -> None:
    """Show nodes, models and replicas, and what happened last.

    TOK/S counts the tokens of all answers now, QUEUE the requests that wait for a slot. HIT RATE is the share of prompt
    tokens that the cache had. Events are seen by nodes that take requests, and shown there.
    """
    from localrun.cluster import reports, view

    reports.require_ray()
    report = next(one for one in reports.ask(reports.Look()) if isinstance(one, reports.ClusterReport))
    report = msgspec.structs.replace(report, nodes=_last_of_each(report.nodes), events=view.kept_events())
    if as_json:
        print_json(report)
        return
    print(_shown(report))


@cluster_command.command("drain")
@click.argument("node")
@click.option("--seconds", type=click.IntRange(min=1), default=DRAIN_S, show_default=True,
              help="How long running answers have there; what is left goes on elsewhere.")  # fmt: skip
def drain(node: str, seconds: int) -> None:
    """Take the replicas away from NODE, which can be switched off then. It gets no others."""
    from localrun.cluster import reports

    reports.require_ray()
    list(reports.ask(reports.Drain(node=node, deadline_s=seconds)))
    say(f"{node} is drained; `localrun cluster down` there takes it out of the cluster")


@cluster_command.command("down")
def down() -> None:
    """Take this machine out of the cluster. On the head, that is the cluster's end.

    Other nodes keep waiting for a head, and join it again when there is one.
    """
    from localrun.cluster import settings as kept

    member = kept.membership()
    os.kill(member.pid, signal.SIGTERM)
    until_s = time.monotonic() + END_TIMEOUT_S
    while member.is_held:
        if time.monotonic() > until_s:
            raise Unavailable(f"process {member.pid} is still there after {END_TIMEOUT_S:g} s; it ends its streams")
        time.sleep(0.1)
    say("the cluster is down" if member.is_head else f"'{member.node}' has left the cluster")


# --- what up and join have in common ----------------------------------------------------------------------------------


@contextmanager
def _held(member: Membership, token: str) -> Iterator[Node]:
    """While this machine is in the cluster."""
    from localrun.cluster import reports
    from localrun.cluster import settings as kept
    from localrun.cluster.catalogue import giving
    from localrun.cluster.on_ray.nodes import Node

    reports.require_ray()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # what is begun here has its end
    kept.keep(member, token)
    try:
        if member.is_head:
            kept.check_ports(member)
        with giving(member, load_settings({})) as has, Node(member, has.labels) as node:
            yield node
    finally:
        kept.forget()


def _be_a_door(settings: Settings) -> None:
    from localrun.cluster.door import Door

    door = Door()
    door.fetch()
    run_daemon(settings, elsewhere=door)


def _check_free(settings: Settings) -> None:
    """Before Ray is started. Raises PortBusy."""
    if settings.port and (version := daemon_version(settings)) is not None:
        raise PortBusy(
            f"localrun {version} runs at port {settings.port} already; end it (localrun stop --daemon), or give the "
            f"cluster another --port"
        )


def _named(name: str | None) -> str:
    return name or socket.gethostname().partition(".")[0]


# --- what status shows ------------------------------------------------------------------------------------------------


def _shown(report: ClusterReport) -> str:
    parts = [table(_NODES, report.nodes)]
    if report.apps:
        parts.append(table(_APPS, report.apps))
    if replicas := [(app, one) for app in report.apps for one in app.replicas]:
        parts.append(table(_REPLICAS, replicas))
    parts += [f"{app.description.model}: {app.message}" for app in report.apps if app.message]
    parts += [f"{app.description.model} on {one.node}: {one.why_not}" for app, one in replicas if one.why_not]
    if report.events:
        parts.append(table(_EVENTS, report.events))
    return "\n\n".join(parts)


def _last_of_each(nodes: Sequence[NodeReport]) -> tuple[NodeReport, ...]:
    """Without the dead ones that came back, which Ray knows as others of the same name."""
    by_name: dict[str, NodeReport] = {}
    for node in sorted(nodes, key=lambda node: node.state != "dead"):
        by_name[node.node] = node
    return tuple(node for node in nodes if node.state != "dead" or by_name[node.node] is node)


def _load(of: Callable[[Any], Sequence[ReplicaReport]], *, slots_go: int = 0) -> list[Column[Any]]:
    """What the replicas of a row have to do, all of them together."""

    def n(row: Any, name: str) -> Any:
        return sum(getattr(one, name) for one in of(row))

    def n_in_engines(row: Any, name: str) -> Any:
        return sum(getattr(one.row, name) for one in of(row) if one.row is not None)

    def hit_rate(row: Any) -> str:
        n_prompt = n_in_engines(row, "prompt_tokens_total")
        return f"{n_in_engines(row, 'cached_tokens_total') / n_prompt:.0%}" if n_prompt else "-"

    return [
        Column("SLOTS", lambda row: f"{n(row, 'n_running')}/{n(row, 'n_slots')}", goes=slots_go),
        Column("KV CELLS", lambda row: f"{n_in_engines(row, 'kv_cells_used')}/{n_in_engines(row, 'kv_cells')}", goes=5),
        Column("QUEUE", lambda row: f"{n(row, 'n_queued')}", goes=4),
        Column("TOK/S", lambda row: f"{n(row, 'tokens_per_s'):.1f}"),
        Column("HIT RATE", hit_rate),
    ]


_NODES: list[Column[NodeReport]] = [
    Column("NODE", lambda node: node.node + " (head)" * node.is_head),
    Column("STATE", lambda node: node.state),
    Column("ADDRESS", lambda node: node.address),
    Column("CPUS", lambda node: f"{node.n_cpus:g}", goes=2),
    Column("GPUS", lambda node: f"{node.n_gpus:g}", goes=1),
]
_APPS: list[Column[AppReport]] = [
    Column("MODEL", lambda app: app.description.model),
    Column("STATE", lambda app: app.state),
    Column("REPLICAS", lambda app: f"{app.n_ready}/{app.n_wanted}"),
    *_load(lambda app: app.replicas, slots_go=3),
]
_REPLICAS: list[Column[tuple[AppReport, ReplicaReport]]] = [
    Column("MODEL", lambda pair: pair[0].description.model),
    Column("NODE", lambda pair: pair[1].node),
    *_load(lambda pair: [pair[1]]),
    Column("PORT", lambda pair: str(pair[1].port), goes=2),
    Column("PID", lambda pair: str(pair[1].pid), goes=1),
]
_EVENTS: list[Column[Event]] = [
    Column("TIME", lambda one: f"{datetime.fromtimestamp(one.at_s).astimezone():%Y-%m-%d %H:%M:%S}"),
    Column("EVENT", lambda one: one.text),
]
