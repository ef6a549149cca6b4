"""A replica in a process of its own, with a fake engine: `python -m tests.cluster.replica_process FOLDER NAME PORT`.
Prints the port, and lives until its standard input ends."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from localrun.cluster.replica import Replica
from localrun.config import Settings
from localrun.models.storage.store import Store
from localrun.server.engines.resident import EngineLease
from localrun.server.engines.supervisor import Supervisor
from tests.cluster.test_wire import APP, TOKEN
from tests.fakes import ENGINE


async def main(folder: str, name: str, port: int) -> None:
    settings = Settings(models_dir=folder, kv_cells=8192, keep_alive_s=-1)

    async def borrow() -> EngineLease:
        return await supervisor.acquire(name, -1)

    replica = Replica(borrow, token=TOKEN, app=APP)
    supervisor = Supervisor(
        settings, Store(Path(folder)), command=ENGINE, on_step=replica.on_step, on_loaded=lambda link: None,
        on_ended=replica.on_ended,
    )  # fmt: skip
    supervisor.start()
    print(await replica.start("127.0.0.1", port), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await replica.stop()
    await supervisor.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
