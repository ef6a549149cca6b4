"""A program that pulls from a hub and says how far it is, to be killed: ENDPOINT CACHE REPO.

Prints one line for every progress: `at BYTES`, and `verifying`, `done`.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

from localrun.models import quant_choice
from localrun.models.download import huggingface
from localrun.models.download.fetch import new_client
from localrun.models.download.huggingface import HubName
from localrun.models.download.plan import FetchLimits, Item

N_CONNECTIONS = 4
RECORD_BYTES = 32 * 1024


class Printed:
    def advanced(self, item: Item, n_bytes_done: int) -> None:
        print("at", n_bytes_done, flush=True)

    def verifying(self, item: Item) -> None:
        print("verifying", flush=True)


async def main(endpoint: str, cache: str, repo: str) -> None:
    hub = huggingface.Hub(endpoint=endpoint, token=None, cache_folder=Path(cache))
    choose = partial(quant_choice.choose, tag=None, memory_bytes=16 * 10**9, repo=repo)
    limits = FetchLimits(
        connections=N_CONNECTIONS,
        part_bytes=256 * 1024,
        record_bytes=RECORD_BYTES,
        sync_bytes=512 * 1024,
        reserve_bytes=0,
    )
    plan = await huggingface.plan(HubName(repo), hub=hub, choose=choose)
    async with new_client() as client:
        await huggingface.download(plan, hub=hub, client=client, limits=limits, progress=Printed())
    print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
