"""A server under measurement, as a child process: started, waited for, warmed up, restarted, weighed, ended.

`local_server` is a daemon of ours. A restart keeps the port, and whatever the server keeps on disk. A server counts as
started when `/health` answers 200 and one short completion has been made, so that neither loading nor the first step is
part of what is measured later.

Does not: measure anything but resident memory.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import psutil

from localrun.bench.results import Target
from localrun.errors import LocalrunError
from localrun.processes import DETACHED

NAME = "localrun"

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05
LOG_TAIL_LINES = 12
WARM_UP_TOKENS = 16


class ServerFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is started with. `model` is an absolute path or a name; `latency` is a mode of ours."""

    model: Path
    slots: int
    kv_cells: int
    threads: int
    latency: str


@dataclass
class ServerProcess:
    """A context manager. `command` lacks the port, which is appended as `--port N`; `environ` is added to ours.

    `model` is the name under which requests ask for the model. The server's output goes to `log_path`. `files` is the
    folder in which it keeps what outlives it, None when it keeps nothing. `can_switch` is that of the target.
    """

    name: str
    command: list[str]
    model: str
    log_path: Path
    _: KW_ONLY
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Path | None = None
    can_switch: bool = False
    _port: int = field(default=0, init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def target(self) -> Target:
        """Where the running server is. Raises LocalrunError when it does not run."""
        base_url = f"http://127.0.0.1:{self._port}"
        return Target(self.name, base_url, self.model, self._running().pid, self.can_switch)

    def start(self) -> None:
        """Returns when the model is loaded and has answered once. Raises LocalrunError with the end of its log."""
        self._port = self._port or _free_port()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    [*self.command, "--port", str(self._port)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **self.environ},
                    **DETACHED,  # a Ctrl-C in the terminal is for us; servers are ended in order
                )  # fmt: skip
            except OSError as error:
                raise LocalrunError(f"{self.name}: {self.command[0]} cannot be started: {error}") from error
        try:
            self._wait_until_healthy()
            self._warm_up()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the server and its children; harmless when it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        children = _family(process.pid)[1:]
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # A child that outlives its parent would share the processor with the next run.
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        for child in psutil.wait_procs(children, timeout=STOP_TIMEOUT_S)[1]:
            child.kill()

    def restart(self) -> None:
        """A new process at the same address, with the same files."""
        self.stop()
        self.start()

    def forget(self) -> None:
        """Removes what a server that has ended left behind for the next one."""
        if self.files is not None:
            shutil.rmtree(self.files, ignore_errors=True)

    def rss_bytes(self) -> int:
        """Resident bytes of the server and its children. Pages that several of them share count for each.

        Raises LocalrunError when the server has ended by itself.
        """
        total_bytes = 0
        status = self._running().poll()
        if status is not None:
            raise LocalrunError(f"{self.name} ended while it was measured, with status {status}{self._log_tail()}")
        for process in _family(self._running().pid):
            with suppress(psutil.NoSuchProcess):
                total_bytes += process.memory_info().rss
        return total_bytes

    def busy_s(self) -> float:
        """Processor seconds of the server and its children; 0 where one of them has just ended."""
        try:
            times = [process.cpu_times() for process in _family(self._running().pid)]
        except psutil.NoSuchProcess:
            return 0.0
        return float(sum(each.user + each.system for each in times))

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise LocalrunError(f"{self.name} does not run")
        return self._process

    def _wait_until_healthy(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self._request("GET", "/health", None) != 200:
            status = self._running().poll()
            if status is not None:
                raise LocalrunError(f"{self.name} ended at once, with status {status}{self._log_tail()}")
            if time.monotonic() > deadline_s:
                raise LocalrunError(f"{self.name} did not start in {START_TIMEOUT_S:g} s{self._log_tail()}")
            time.sleep(POLL_INTERVAL_S)

    def _warm_up(self) -> None:
        body = {"model": self.model, "prompt": "Once upon a time", "max_tokens": WARM_UP_TOKENS}
        status = self._request("POST", "/v1/completions", {**body, "temperature": 0, "ignore_eos": True})
        if status != 200:
            raise LocalrunError(f"{self.name} answered its first request with status {status}{self._log_tail()}")

    def _request(self, method: str, path: str, body: dict[str, object] | None) -> int:
        """The status of the answer; 0 when there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=START_TIMEOUT_S)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            return response.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "; the end of its log:" + "".join(f"\n  {line}" for line in lines[-LOG_TAIL_LINES:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def local_server(flags: ServerFlags, folder: Path) -> ServerProcess:
    """A daemon on a free port; not started yet.

    LOCALRUN_HOME is a folder of its own within `folder`, so a restart finds the cache on disk that the process before
    it left, and the user's own daemon, models and cache are not touched. Other `LOCALRUN_*` variables go through: they
    are how a comparison is run with one setting changed.
    """
    # -P: the folder that the user happens to be in must not be a place to import from.
    command = [sys.executable, "-P", "-m", "localrun", "serve", "--host", "127.0.0.1"]
    command += ["--slots", str(flags.slots), "--kv-cells", str(flags.kv_cells), "--threads", str(flags.threads)]
    command += ["--latency", flags.latency, "--keep-alive-s", "-1"]
    home = folder / "home"
    environ = {"LOCALRUN_HOME": str(home)}
    return ServerProcess(
        NAME, command, str(flags.model), folder / "localrun.log", environ=environ, files=home, can_switch=True
    )
