"""Stands between localrun and a server of tools that is a program: it ends with us, and its output is bounded.

Runs as a process of its own, the leader of the server's process group, with nothing but the standard library:

    python guard.py COMMAND [ARGUMENT...]

Copies standard input and output. When its input ends, whether localrun closed it or was killed, the server has
`GRACE_S` to end by itself; then its whole group is asked to, and `TERMINATE_S` later killed. Lines of its output that
cannot be messages (a banner, a debug print) go to standard error, shortened; a line beyond `MAX_LINE_BYTES` ends it.

Does not: run on Windows, where a job object does this.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress

# Together below the 4 seconds after which the MCP library kills this process.
GRACE_S = 1.5
TERMINATE_S = 1.0
FLUSH_S = 0.5
MAX_LINE_BYTES = 32_000_000
SHOWN_BYTES = 200
_CHUNK_BYTES = 65536
_MAX_CHUNKS = 512


def main(command: list[str]) -> None:
    """Runs the server until it or our input ends. Does not return where a group has to be killed."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, not inherited
    try:
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    except (OSError, ValueError) as error:
        _say(f"{command[0]} cannot be started: {getattr(error, 'strerror', None) or error}")
        sys.exit(127)
    is_over = threading.Event()
    unread: queue.Queue[bytes] = queue.Queue(_MAX_CHUNKS)
    threading.Thread(target=_copy_in, args=(server, unread), daemon=True).start()
    copying_out = threading.Thread(target=_copy_out, args=(server, is_over), daemon=True)
    copying_out.start()
    threading.Thread(target=_wait, args=(server, is_over), daemon=True).start()
    threading.Thread(target=_read_input, args=(unread, is_over), daemon=True).start()
    is_over.wait()
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    if server.returncode is None:
        os.killpg(0, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(TERMINATE_S)
    elif server.returncode:
        _say(f"ended with status {server.returncode}")
    copying_out.join(FLUSH_S)
    os.killpg(0, signal.SIGKILL)  # and what the server has left behind


def _wait(server: subprocess.Popen[bytes], is_over: threading.Event) -> None:
    server.wait()
    is_over.set()


def _read_input(unread: queue.Queue[bytes], is_over: threading.Event) -> None:
    """Ahead of a server that does not read, and whatever became of it: the end of our input is what counts."""
    while data := os.read(0, _CHUNK_BYTES):
        try:
            unread.put_nowait(data)
        except queue.Full:
            _say(f"did not read {_MAX_CHUNKS * _CHUNK_BYTES // 1_000_000} MB")
            break
    with suppress(queue.Full):
        unread.put_nowait(b"")
    is_over.set()


def _copy_in(server: subprocess.Popen[bytes], unread: queue.Queue[bytes]) -> None:
    assert server.stdin is not None
    with suppress(OSError):
        while data := unread.get():
            while data:
                data = data[server.stdin.write(data) :]
    with suppress(OSError):
        server.stdin.close()


def _copy_out(server: subprocess.Popen[bytes], is_over: threading.Event) -> None:
    assert server.stdout is not None
    pending = bytearray()
    with suppress(OSError):
        while data := server.stdout.read(_CHUNK_BYTES):
            pending += data
            if b"\n" in data:
                *lines, pending = pending.split(b"\n")
                for line in lines:
                    _pass_on(line)
            elif len(pending) > MAX_LINE_BYTES:
                _say(f"wrote a line of more than {MAX_LINE_BYTES // 1_000_000} MB")
                is_over.set()
                return
        if pending:
            _pass_on(pending)


def _pass_on(line: bytearray) -> None:
    if not line.lstrip().startswith(b"{"):
        if line.strip():
            os.write(2, line[:SHOWN_BYTES] + b"\n")
        return
    rest = memoryview(bytes(line) + b"\n")
    while rest:
        rest = rest[os.write(1, rest) :]


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))


if __name__ == "__main__":
    main(sys.argv[1:])
