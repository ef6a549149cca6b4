"""A replica in a process of its own, with a fake engine: `python -m tests.cluster.replica_process FOLDER NAME PORT`.
Prints the port, and what the replica says of itself for each name of a node on its standard input, with which it
ends."""

from __future__ import annotations

import asyncio
import os
import sys
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


async def main(folder: str, name: str, port: int) -> None:
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
    print(port, flush=True)
    while node := (await asyncio.to_thread(sys.stdin.readline)).strip():
        report = ReplicaReport(
            id=f"{node} {os.getpid()}", node=node, host="127.0.0.1", port=port, pid=os.getpid(), fingerprint=APP
        )
        try:
            report = reporter.said(report, replica.link)
        except Unavailable:
            report = msgspec.structs.replace(report, why_not=replica.why_not)
        print(msgspec.json.encode(report).decode(), flush=True)
    await replica.stop()
    await supervisor.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
