"""Runs workloads one after the other against one server, and keeps what came out.

Runs in the main thread: each run has an event loop of its own, and Ctrl-C ends the run that is going, whose finished
requests still count.

Does not: compare servers (`compare.py`), or print.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from localrun.bench.local_server import local_server
from localrun.bench.results import Options, RunResult, Target, Workload
from localrun.bench.server_flags import ServerFlags
from localrun.bench.server_process import ServerProcess
from localrun.bench.workloads.workload import INTERRUPTED
from localrun.models.synthesize import synthesize


def random_seed() -> int:
    """A seed that no server has seen, so that cold prompts are cold."""
    return secrets.randbelow(2**31)


@dataclasses.dataclass(frozen=True)
class Session:
    """What is measured, how, and `server`, where it is our own: it can be restarted and its memory is known."""

    target: Target
    options: Options
    server: ServerProcess | None = None

    def run(self, workloads: Sequence[Workload], rounds: int, on_result: Callable[[RunResult], None]) -> bool:
        """Every workload, then every workload again, `rounds` times, each run with prompts of its own.

        Every result goes to `on_result` as soon as it is there. False when Ctrl-C ended it before its time. Raises
        what `Workload.run` raises.
        """
        options = self.options
        if self.server is not None:
            options = dataclasses.replace(options, restart=self._restart)
        for index, workload in enumerate([*workloads] * rounds):
            target = self.target if self.server is None else self.server.target
            result = asyncio.run(workload.run(target, dataclasses.replace(options, seed=options.seed + index)))
            was_interrupted = result.note == INTERRUPTED
            # Ctrl-C reaches our server, too: it may be gone already.
            if self.server is not None and not was_interrupted:
                result.metrics["rss_bytes"] = float(self.server.rss_bytes())
            on_result(result)
            if was_interrupted:
                return False
        return True

    async def _restart(self, _target: Target) -> Target:
        assert self.server is not None
        await asyncio.to_thread(self.server.restart)
        return self.server.target


@contextmanager
def own_server(model: Path | None, *, slots: int, kv_cells: int, threads: int, latency: str) -> Iterator[ServerProcess]:
    """A daemon of our own with a temporary home. Without `model` it runs a synthesized 135M Q4_0, of real size and
    speed, whose text is noise."""
    with tempfile.TemporaryDirectory(prefix="localrun-bench-") as folder:
        path = model
        if path is None:
            path = Path(folder, "135m-q4_0.gguf")
            synthesize("135m", "Q4_0", path)
        flags = ServerFlags(model=path, slots=slots, kv_cells=kv_cells, threads=threads, latency=latency)
        with local_server(flags, Path(folder)) as server:
            yield server
