"""Worker processes on the event loops that daemons have; the rest is tested with the workers themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from localrun import framing
from localrun.errors import Unavailable
from localrun.server.workers import WorkerProcess
from localrun.wire import RenderReply, RenderRequest, Segment
from tests.server.waiting import until

LOOPS: list[Callable[[], Any]] = [asyncio.new_event_loop]
if sys.platform != "win32":
    import uvloop

    LOOPS.append(uvloop.new_event_loop)


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("notices", [False, True])
def test_a_worker_that_died_while_nobody_asked_is_replaced(new_loop: Callable[[], Any], notices: bool) -> None:
    """`notices`: whether the event loop has seen its end by the next request."""
    request = RenderRequest(template="hi", variables={}, control_tokens=(), output_bytes=10, cpu_s=9)

    async def main() -> None:
        worker: WorkerProcess[RenderReply] = WorkerProcess(
            "localrun.server.templates.worker", framing.decode_from_renderer, name="template", timeout_s=20
        )
        await worker.start()
        try:
            for _ in range(2):
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL)
                if notices:
                    await until(lambda: _has_ended(worker))
                assert (await worker.ask(framing.encode(request))).segments == (Segment("hi"),)
        finally:
            await worker.stop()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def _has_ended(worker: WorkerProcess[RenderReply]) -> bool:
    process = worker._worker
    return process is not None and process.returncode is not None


@pytest.mark.parametrize("n_ends", [1, 2])
async def test_a_worker_that_is_killed_while_it_starts_is_started_once_more(
    n_ends: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doomed_worker.py").write_text(
        "import os, pathlib, runpy, signal, sys\n"
        "mark = pathlib.Path(sys.argv.pop())\n"
        "mark.write_text(mark.read_text() + '.')\n"
        f"if len(mark.read_text()) <= {n_ends}:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "runpy.run_module('localrun.server.templates.worker', run_name='__main__')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (mark := tmp_path / "mark").touch()
    worker: WorkerProcess[RenderReply] = WorkerProcess(
        "doomed_worker", framing.decode_from_renderer, name="template", timeout_s=20, arguments=[str(mark)]
    )
    request = RenderRequest(template="hi", variables={}, control_tokens=(), output_bytes=10, cpu_s=9)
    try:
        if n_ends == 1:
            assert (await worker.ask(framing.encode(request))).segments == (Segment("hi"),)
        else:
            with pytest.raises(Unavailable, match="template worker did not start"):
                await worker.ask(framing.encode(request))
    finally:
        await worker.stop()
    assert mark.read_text() == ".."


async def test_a_worker_that_nobody_waits_for_any_more_while_it_starts_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_worker.py").write_text(
        "import os, pathlib, sys, time\npathlib.Path(sys.argv.pop()).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    mark = tmp_path / "mark"
    worker: WorkerProcess[RenderReply] = WorkerProcess(
        "slow_worker", framing.decode_from_renderer, name="template", timeout_s=20, arguments=[str(mark)]
    )
    starting = asyncio.create_task(worker.start())
    await until(lambda: mark.exists() and mark.read_text())
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not psutil.pid_exists(int(mark.read_text()))
