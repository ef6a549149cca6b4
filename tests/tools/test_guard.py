"""The guard ends its server with us, however we end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from localrun.tools import guard

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a job object does this there")

PATIENCE_S = 60.0
# Ignores the end of its input and SIGTERM, and has a child that does nothing.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print('{"pids": [%d, %d]}' % (os.getpid(), child.pid), flush=True)
time.sleep(3600)
"""


def _guarded(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", guard.__file__, sys.executable, "-c", program]


def _start(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        _guarded(program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def _wait_until_gone(pids: list[int]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while any(map(_is_alive, pids)):
        assert time.monotonic() < deadline_s, f"{pids} live on"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_messages_pass_and_other_lines_go_to_standard_error() -> None:
    program = "import sys; print('hello'); print(sys.stdin.readline().strip()); print('{\"b\": ' + '9' * 200_000 + '}')"
    process = _start(program)
    out, err = process.communicate(b'{"a": 1}\n', timeout=PATIENCE_S)
    assert out == b'{"a": 1}\n{"b": ' + b"9" * 200_000 + b"}\n"
    assert b"hello" in err


def test_a_program_that_is_none_and_one_that_fails_are_said() -> None:
    nowhere = [*_guarded("")[:4], "/nowhere/server"]
    said = subprocess.run(nowhere, capture_output=True, stdin=subprocess.DEVNULL, check=False, timeout=PATIENCE_S)
    assert said.stderr == b"/nowhere/server cannot be started: No such file or directory\n"
    _, err = _start("import sys; sys.exit(3)").communicate(timeout=PATIENCE_S)
    assert b"ended with status 3" in err


def test_a_line_without_end_ends_the_server() -> None:
    process = _start("import os\nwhile True: os.write(1, b'x' * 65536)")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert out == b""
    assert b"wrote a line of more than 32 MB" in err


def _end_with_its_input(process: subprocess.Popen[bytes], pids: list[int]) -> None:
    """Nothing of it is left when its input is closed."""
    assert process.stdin is not None
    process.stdin.close()
    _wait_until_gone([*pids, process.pid])
    process.wait()
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()


def test_when_its_input_ends_the_whole_group_does() -> None:
    process = _start(STUBBORN)
    assert process.stdin is not None
    assert process.stdout is not None
    pids = _pids(process.stdout.readline())
    _end_with_its_input(process, pids)


def test_a_server_that_does_not_read_ends_with_its_input_too() -> None:
    process = _start(STUBBORN)
    assert process.stdin is not None
    assert process.stdout is not None
    pids = _pids(process.stdout.readline())
    for _ in range(64):  # far more than pipes hold
        process.stdin.write(b"x" * 65536)
    _end_with_its_input(process, pids)


def test_a_server_that_never_reads_is_ended() -> None:
    process = _start(STUBBORN)
    assert process.stdin is not None
    assert process.stdout is not None
    pids = _pids(process.stdout.readline())
    with contextlib.suppress(BrokenPipeError):
        for _ in range(1000):
            process.stdin.write(b"x" * 65536)
    _wait_until_gone([*pids, process.pid])
    _, said = process.communicate()
    assert b"did not read 33 MB" in said


def test_a_kill_of_the_owner_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "said"
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess, time; subprocess.Popen({_guarded(STUBBORN)!r}, stdin=subprocess.PIPE, "
            f"stdout=open({str(path)!r}, 'wb'), start_new_session=True); time.sleep(3600)",
        ]
    )
    deadline_s = time.monotonic() + PATIENCE_S
    while not path.exists() or not path.read_bytes().endswith(b"}\n"):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    guards = [child.pid for child in psutil.Process(owner.pid).children()]
    pids = _pids(path.read_bytes())
    assert all(map(_is_alive, pids))
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    _wait_until_gone([*pids, *guards])


def _pids(line: bytes) -> list[int]:
    return [int(number) for number in line.decode().partition("[")[2].partition("]")[0].split(",")]
