"""What keys cost the daemon: `python -m tests.server.access_cost`, from the source folder.

The processor time of what a request passes besides the rest, in a loop in this process: without keys, with a key, and
with a key that has limits, whose use is written down twice. Microseconds, the median of 7 rounds and their range.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from localrun import wire
from localrun.access.keys import REQUESTS, TOKENS, KeyFile, Limit
from localrun.config import Settings
from localrun.server.http.access import Access, Right
from localrun.server.http.failures import Shape
from localrun.server.jobs.generation import Generation

N_REQUESTS = 2000
N_ROUNDS = 7


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        for name, limits in (
            ("no keys", None),
            ("a key without limits", ()),
            ("a key with limits", (Limit(REQUESTS, 10**9, 60.0), Limit(TOKENS, 10**9, 86400.0))),
        ):
            text = "" if limits is None else KeyFile(data).create(f"k{len(limits)}", limits=limits).text
            access = Access(Settings(), data=data, state=Path(folder) / "state")
            rounds = [await one_round(access, text) for _ in range(N_ROUNDS + 1)][1:]
            print(f"{name}: {statistics.median(rounds):.1f} us ({min(rounds):.1f} to {max(rounds):.1f})")
            access.close()


async def one_round(access: Access, text: str) -> float:
    headers = [(b"host", b"127.0.0.1:11434"), (b"authorization", f"Bearer {text}".encode())]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers,
        "client": ("127.0.0.1", 1), "scheme": "http",
    }  # fmt: skip
    record = Generation("id", "/v1/chat/completions", "", wire.Lane.DEFAULT, "tiny", 0.0)
    record.n_prompt, record.n_cached, record.n_output, record.engine = 100, 50, 20, "tiny"
    began_s = time.process_time()
    for _ in range(N_REQUESTS):
        caller = await access.admit(scope, Right.USE)
        if caller is not None:
            caller.begin("tiny", wire.Lane.DEFAULT)
            caller.headers(Shape.OPENAI)
            caller.record_usage(record, counts_prompt=True)
            caller.leave()
    return (time.process_time() - began_s) / N_REQUESTS * 1e6


if __name__ == "__main__":
    asyncio.run(main())
