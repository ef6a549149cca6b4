"""Daemons that need not import anything: one process has done so, and forks for each.

A test's daemon is a process with its own environment, folder, signals and exit status all the same. Importing what it
is made of takes a second of a processor, and a test run starts hundreds.

Owner: one forking process for each process of tests, which it ends with. No thread and no event loop runs in it, so
what it forks begins as any program does. Does not: start engines or workers; a daemon starts those as programs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import IO

# Linux alone tells of the end of a process by a descriptor.
IS_POSSIBLE = hasattr(os, "pidfd_open")
_MAX_BYTES = 1 << 20


class Forked:
    """A daemon, with fake engines or real ones: what tests use of `subprocess.Popen`."""

    def __init__(self, arguments: tuple[str, ...], environment: dict[str, str], stderr: IO[str], *, fake: bool) -> None:
        self._ends, ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out, written = os.pipe()
        self.stdout = os.fdopen(out, encoding="utf-8")
        self.returncode: int | None = None
        request = json.dumps([arguments, environment, os.getcwd(), fake]).encode()
        with ends:
            socket.send_fds(_forking(), [request], [written, stderr.fileno(), ends.fileno()])
        os.close(written)
        self.pid = int(self._ends.recv(32))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._ends], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("localrun serve", timeout or 0.0)
            self.returncode = int(self._ends.recv(32))
            self._ends.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _forking() -> socket.socket:
    """The way to the process that forks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(channel: socket.socket) -> bool:
    """Forks until the other side is closed; returns in what it has forked, whether its engines are fakes."""
    poll, running = select.poll(), dict[int, tuple[int, socket.socket]]()
    poll.register(channel, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor != channel.fileno():
                pid, ends = running.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                with ends, contextlib.suppress(OSError):  # nobody asks any more
                    ends.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            request, descriptors, *_ = socket.recv_fds(channel, _MAX_BYTES, 3)
            if not request:
                sys.exit()
            out, err, number = descriptors
            ends = socket.socket(fileno=number)
            pid = os.fork()
            if not pid:
                for other in (channel, ends, *(ends for _, ends in running.values())):
                    other.detach()
                return _become(request, out, err)
            os.close(out)
            os.close(err)
            ends.send(b"%d" % pid)
            process = os.pidfd_open(pid)
            running[process] = pid, ends
            poll.register(process, select.POLLIN)


def _become(request: bytes, out: int, err: int) -> bool:
    """A daemon, as if it had been started with these arguments, variables and files."""
    arguments, environment, folder, fake = json.loads(request)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[:] = [str(Path(__file__).with_name("serve.py")), *arguments]
    return bool(fake)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from localrun.cli import root, serve  # noqa: F401 - so that no daemon has to
    from tests.fakes.serve import run

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    run(fake=_serve(socket.socket(fileno=int(sys.argv[1]))))
