"""How programs are started and how they ended, on every system."""

from __future__ import annotations

import ast
import asyncio
import signal
import sys
from asyncio.subprocess import PIPE

import pytest

from localrun.processes import end_child, end_in_words, is_crash, run_text, signal_of
from tests.test_imports import modules

ENDS = [
    (None, None, False, "did not report how it ended"),
    (0, None, False, "exited with status 0"),
    (1, None, False, "exited with status 1"),
    (255, None, False, "exited with status 255"),
    (-signal.SIGSEGV, signal.SIGSEGV, True, "was killed by SIGSEGV"),
    (-signal.SIGABRT, signal.SIGABRT, True, "was killed by SIGABRT"),
    (-9, 9, False, "was killed by SIGKILL"),
    (-99, 99, False, "was killed by signal 99"),
    (0xC0000005, signal.SIGSEGV, True, "exited with status 0xC0000005 (SIGSEGV)"),
    (0xC00000FD, signal.SIGSEGV, True, "exited with status 0xC00000FD (SIGSEGV)"),
    (0xC000001D, signal.SIGILL, True, "exited with status 0xC000001D (SIGILL)"),
    (0xC0000409, signal.SIGABRT, True, "exited with status 0xC0000409 (SIGABRT)"),
    (0xC0000094, signal.SIGFPE, True, "exited with status 0xC0000094 (SIGFPE)"),
    (0xC000013A, signal.SIGINT, False, "exited with status 0xC000013A (SIGINT)"),
    (0xC0000135, None, False, "exited with status 0xC0000135"),  # a library is missing
]


@pytest.mark.parametrize(("returncode", "number", "is_a_crash", "words"), ENDS)
def test_an_end_means_the_same_on_every_system(
    returncode: int | None, number: int | None, is_a_crash: bool, words: str
) -> None:
    assert (signal_of(returncode), is_crash(returncode), end_in_words(returncode)) == (number, is_a_crash, words)


def test_abort_has_a_small_number_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_crash(3)
    monkeypatch.setattr(sys, "platform", "win32")
    assert is_crash(3)
    assert end_in_words(3) == "exited with status 3 (SIGABRT)"


def test_text_of_programs_is_utf_8_and_never_an_error() -> None:
    program = "import sys; sys.stdout.buffer.write('é日'.encode() + b'\\xff'); sys.stderr.write(sys.stdin.read())"
    ended = run_text([sys.executable, "-c", program], 60)
    assert (ended.stdout, ended.stderr) == ("é日�", "")
    assert run_text([sys.executable, "-c", program], 60, input="asked").stderr == "asked"


# Programs that a person starts in a terminal of theirs, and what never runs on Windows.
SEEN = {
    ("localrun.bench.tune", "Popen"),
    ("localrun.hardware.processors", "run"),
    ("localrun.service.manager", "run"),
    ("localrun.tools.guard", "Popen"),
    ("localrun.tui.files", "run"),
}
STARTS = {"run", "Popen", "create_subprocess_exec", "create_subprocess_shell", "subprocess_exec", "subprocess_shell"}


def test_whatever_is_started_unseen_opens_no_window() -> None:
    """By `HIDDEN`, `DETACHED` or `run_text`."""
    without = set()
    for name, path in modules().items():
        if name.startswith("localrun.native_build"):  # a command of its own, before anything is installed
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STARTS:
                owner = node.func.value
                is_subprocess = node.func.attr not in ("run", "Popen") or getattr(owner, "id", "") == "subprocess"
                spread = {getattr(word.value, "id", "") for word in node.keywords if word.arg is None}
                if is_subprocess and not spread & {"HIDDEN", "DETACHED"}:
                    without.add((name, node.func.attr))
    assert without == SEEN


# --- ends of children -------------------------------------------------------------------------------------------------

LEAVES = "import sys; print('here', flush=True); sys.stdin.read(); print('left')"
STAYS = "import time; print('here', flush=True); time.sleep(60)"


async def child_of(program: str) -> asyncio.subprocess.Process:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=PIPE, stdout=PIPE)
    assert child.stdout is not None
    assert await child.stdout.readline() == b"here\n"
    return child


@pytest.mark.parametrize(
    ("program", "leave_s", "returncode", "said"),
    [(LEAVES, 30, 0, b"left\n"), (STAYS, 0.05, -9, b""), (STAYS, 0, -9, b"")],
)
async def test_a_child_may_leave_and_is_killed_if_it_stays(
    program: str, leave_s: float, returncode: int, said: bytes
) -> None:
    child = await child_of(program)
    await end_child(child, leave_s=leave_s)
    assert child.returncode == returncode
    assert child.stdout is not None
    assert await child.stdout.read() == said
    await end_child(child)  # which is no error


async def test_a_child_is_waited_for_though_nobody_wants_to_wait() -> None:
    child = await child_of(LEAVES)
    ending = asyncio.create_task(end_child(child, leave_s=30))
    for _ in range(3):
        await asyncio.sleep(0)
        ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert child.returncode == 0
