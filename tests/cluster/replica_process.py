"""A replica in a process of its own, with a fake engine. Its processes are forked from one that has imported it all."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from localrun.cluster.replica import Replica
from localrun.config import Settings
from localrun.models.storage.store import Store
from localrun.server.engines.resident import EngineLease
from localrun.server.engines.supervisor import Supervisor
from tests.cluster.test_wire import APP, TOKEN
from tests.fakes import ENGINE

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


def start(folder: str, name: str, port: int) -> tuple[BaseProcess, Connection]:
    """The process, and a pipe that it says its port on; it ends in peace when something, or the end, comes there."""
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
    supervisor = Supervisor(
        settings, Store(Path(folder)), command=ENGINE, on_step=replica.on_step, on_loaded=lambda link: None,
        on_ended=replica.on_ended,
    )  # fmt: skip
    supervisor.start()
    pipe.send(await replica.start("127.0.0.1", port))
    await asyncio.to_thread(pipe.poll, None)
    await replica.stop()
    await supervisor.stop()
