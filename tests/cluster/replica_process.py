"""A replica in a process of its own, with a fake engine. Its processes are forked from one that has imported it all."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from localrun import wire
from localrun.cluster.replica import Replica
from localrun.cluster.reports import ReplicaReport
from localrun.cluster.view import Reporter
from localrun.config import Settings
from localrun.errors import Unavailable
from localrun.models.storage.store import Store
from localrun.server.engines.link import EngineLink
from localrun.server.engines.resident import EngineLease
from localrun.server.engines.supervisor import Supervisor
from tests.cluster.test_wire import APP, TOKEN
from tests.fakes import ENGINE

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


def start(folder: str, name: str, port: int) -> tuple[BaseProcess, Connection]:
    """The process, and a pipe that it says its port on, and for the name of a node what it reports; it ends in peace
    when that name is empty, or at the pipe's end."""
    ours, its = _context.Pipe()
    process = _context.Process(target=_run, args=(folder, name, port, its, dict(os.environ)), daemon=True)
    process.start()
    its.close()
    return process, ours


def _run(folder: str, name: str, port: int, pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    asyncio.run(_main(folder, name, port, pipe))


async def _main(folder: str, name: str, port: int, pipe: Connection) -> None:
    settings = Settings(models_dir=folder, kv_cells=8192, keep_alive_s=-1)

    async def borrow() -> EngineLease:
        return await supervisor.acquire(name, -1)

    replica = Replica(borrow, token=TOKEN, app=APP)

    def on_step(link: EngineLink, step: wire.Step) -> None:
        replica.on_step(link, step)
        reporter.on_step(link, step)

    supervisor = Supervisor(
        settings, Store(Path(folder)), command=ENGINE, on_step=on_step, on_loaded=lambda link: None,
        on_ended=replica.on_ended,
    )  # fmt: skip
    reporter = Reporter(supervisor.loaded)
    supervisor.start()
    port = await replica.start("127.0.0.1", port)
    pipe.send(port)
    with contextlib.suppress(EOFError):
        while node := await asyncio.to_thread(pipe.recv):
            report = ReplicaReport(
                id=f"{node} {os.getpid()}", node=node, host="127.0.0.1", port=port, pid=os.getpid(), fingerprint=APP
            )
            try:
                pipe.send(reporter.said(report, replica.link))
            except Unavailable:
                pipe.send(msgspec.structs.replace(report, why_not=replica.why_not))
    await replica.stop()
    await supervisor.stop()
