"""A head or a door, as far as books go, in a process of its own that can be killed:
`python -m tests.cluster.books_process head|door FOLDER PORT KEY SECONDS_OFF REQUESTS`.

A door says `begun` before a request, `done` when its client has seen the end, and `told` when the head has it all."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

_, ROLE, FOLDER, PORT, KEY, SECONDS_OFF, N_REQUESTS = sys.argv
_clock = time.time
time.time = lambda: _clock() + float(SECONDS_OFF)  # before anybody takes it

from localrun.cluster import ledger  # noqa: E402
from localrun.errors import LocalrunError  # noqa: E402
from tests.cluster.test_books import DoorMachine, HeadMachine  # noqa: E402


async def main() -> None:
    ledger.LOOK_EVERY_S = 0.02
    head = HeadMachine(Path(FOLDER))
    head.port = int(PORT)
    if ROLE == "head":
        await head.start()
        print("up", flush=True)
        await asyncio.Event().wait()
    door = DoorMachine(head, Path(FOLDER))
    await door.start()
    print("up", flush=True)
    for _ in range(int(N_REQUESTS)):
        try:
            print("begun", flush=True)
            await door.ask(KEY, 3)
            print("done", flush=True)
        except LocalrunError:
            print("refused", flush=True)
        await asyncio.sleep(0.005)
    while door.ledger._n_told != door.ledger.usage.n_writes:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    print("told", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
