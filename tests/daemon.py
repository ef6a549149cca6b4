"""A real daemon process for tests that speak HTTP: `with running_daemon() as daemon: daemon.post(...)`.

By default its engines are fakes: tokens are the bytes of the text (plus `<|im_start|>` and `<|im_end|>` as 256 and
257), so a prompt's length is known, and the output is a function of the prompt alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2

from localrun.hardware import kernels
from tests.fakes import SERVE, forked

START_TIMEOUT_S = 120.0
N_CTX = 2048
# Variables that an interpreter, or a library, does not read before the daemon does.
_READ_LATE = ("LOCALRUN_", "HF_", "OLLAMA_")
_verdicts: dict[kernels.Pair, kernels.Verdict] = {}


class Daemon:
    """`url` of the daemon, `http` to speak with it, `home` has all its folders."""

    def __init__(
        self, url: str, process: subprocess.Popen[str] | forked.Forked, log: Path, home: Path | None = None
    ) -> None:
        self.url = url
        self.process = process
        self._log = log
        self.home = log.parent if home is None else home
        self.http = self._new_client()

    def _new_client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=60, trust_env=False)

    def disconnect(self) -> None:
        """Closes this side's connections; the next request opens one."""
        self.http.close()
        self.http = self._new_client()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def post(self, path: str, body: object = None, **fields: Any) -> httpx2.Response:
        """A JSON request. `fields` are the body when none is given."""
        return self.http.post(path, json=fields if body is None else body)

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Ends the daemon. Its exit status."""
        self.process.send_signal(signal_number)
        return self.process.wait(timeout=60)


@contextmanager
def running_daemon(
    *arguments: str, fake: bool = True, within: tuple[str, ...] = (), **environment: str
) -> Iterator[Daemon]:
    """`environment` adds to a clean one; `arguments` go to `localrun serve`, which `within` runs if it is given."""
    is_forked = not within and all(name.startswith(_READ_LATE) for name in environment)
    with tempfile.TemporaryDirectory() as home, ExitStack() as around:
        if is_forked and not fake:
            around.enter_context(_kernels_probed_once(Path(environment.get("LOCALRUN_HOME", home)) / "cache"))
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("LOCALRUN_", "HF_", "OLLAMA_"))
        }
        own = {"LOCALRUN_HOME": home, "LOCALRUN_SLOTS": "4", "LOCALRUN_KV_CELLS": str(N_CTX)}
        # Nobody's own models are listed, filled up or cleaned.
        own["HF_HOME"] = str(Path(home) / "huggingface")
        own |= {"HOME": home, "USERPROFILE": home, "OLLAMA_MODELS": str(Path(home) / "ollama")}
        # Two tests run at a time, and threads of two engines would wait for each other's processors.
        own |= {} if fake else {"LOCALRUN_THREADS": "1"}
        log = Path(home) / "log.txt"
        process: subprocess.Popen[str] | forked.Forked
        with log.open("w") as log_file:
            if is_forked and forked.IS_POSSIBLE:
                process = forked.Forked(("--port", "0", *arguments), inherited | own | environment, log_file, fake=fake)
            else:
                command = SERVE if fake else (sys.executable, "-m", "localrun", "serve")
                process = subprocess.Popen(
                    [*within, *command, "--port", "0", *arguments],
                    env=inherited | own | environment, stdout=subprocess.PIPE, stderr=log_file, text=True,
                )  # fmt: skip
        assert process.stdout is not None
        too_late = threading.Timer(START_TIMEOUT_S, process.kill)
        too_late.start()
        line = process.stdout.readline()
        too_late.cancel()
        daemon = None
        try:
            assert line.startswith("localrun is listening on http://"), log.read_text(errors="replace")
            daemon = Daemon(line.split()[-1], process, log, Path((own | environment)["LOCALRUN_HOME"]))
            yield daemon
        finally:
            if daemon is not None:
                daemon.http.close()
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            process.stdout.close()


@contextmanager
def _kernels_probed_once(cache: Path) -> Iterator[None]:
    """What a daemon finds in two quiet seconds is given to those after it, which would take as long for the same."""
    folder, pair = kernels.folder(cache), kernels.present_pair()
    if pair in _verdicts and kernels.read(folder, pair) == kernels.Verdict():
        kernels.keep(folder, pair, _verdicts[pair])
    yield
    if pair is not None and (found := kernels.read(folder, pair)).is_probed and not found.crashes:
        _verdicts[pair] = found


@contextmanager
def calling_daemon(models: Path, template: str, *, kv_cells: int) -> Iterator[Daemon]:
    """One with the model `caller`, whose fake engine says what a prompt scripts (`SAY[[...]]`), such as calls."""
    with running_daemon(
        LOCALRUN_MODELS=str(models), LOCALRUN_FAKE_SCRIPTS="1", LOCALRUN_KV_CELLS=str(kv_cells)
    ) as running:  # fmt: skip
        made = running.post("/api/create", model="caller", **{"from": "tiny"}, template=template, stream=False)
        assert made.json() == {"status": "success"}, made.text
        yield running
