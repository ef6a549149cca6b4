"""The whole program in a real terminal: `localrun` under tmux, keys typed into the pane and the pane read back."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from localrun.snapshot import Snapshot
from localrun.tui.daemon import Recorder
from tests.clients.real_daemons import TOOL_TEMPLATE
from tests.daemon import Daemon, calling_daemon, running_daemon

PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


# The size of a terminal is its own, not what pytest's environment says of another one.
_UNSET = ("-u", "COLUMNS", "-u", "LINES")


class Terminal:
    """A pane of a tmux server of its own, in which a command runs."""

    def __init__(self, folder: Path, command: list[str], environment: dict[str, str], size: tuple[int, int]) -> None:
        self._socket = str(folder / f"tmux-{uuid.uuid4().hex[:8]}")
        width, height = map(str, size)
        settings = [f"{name}={value}" for name, value in environment.items()]
        self._tmux(
            "-f", "/dev/null", "new-session", "-d", "-x", width, "-y", height, "env", *_UNSET, *settings, *command
        )
        self._tmux("set-option", "-g", "remain-on-exit", "on")
        self._tmux("set-option", "-s", "set-clipboard", "on")

    def _tmux(self, *arguments: str) -> str:
        found = subprocess.run(["tmux", "-S", self._socket, *arguments], capture_output=True, text=True, check=True)
        return found.stdout

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)

    def drop(self, path: Path) -> None:
        """A file, which a terminal types as a pasted path."""
        self._tmux("set-buffer", f"'{path}'")
        self._tmux("paste-buffer", "-p")

    def paste(self, text: str) -> None:
        self._tmux("set-buffer", text)
        self._tmux("paste-buffer", "-p", "-r")

    @property
    def clipboard(self) -> str:
        """What a program put there last."""
        return self._tmux("show-buffer").removesuffix("\n")

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    @property
    def pane(self) -> str:
        return self._tmux("capture-pane", "-p")

    @property
    def colours(self) -> str:
        """The pane with its escape sequences."""
        return self._tmux("capture-pane", "-p", "-e")

    def told(self, asked: str) -> str:
        """What tmux knows of the pane."""
        return self._tmux("display-message", "-p", asked).strip()

    def see(self, text: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while text not in self.pane:
            assert time.monotonic() < deadline_s, f"{text!r} did not appear on:\n{self.pane}"
            time.sleep(0.05)

    def see_it_end(self) -> None:
        """Waits until the program is gone; neither a signal nor an error ended it, as far as tmux knows its status."""
        deadline_s = time.monotonic() + PATIENCE_S
        asked = "#{pane_dead},#{pane_dead_status},#{pane_dead_signal}"
        while (state := self.told(asked)) not in ("1,0,", "1,,"):
            assert time.monotonic() < deadline_s, f"not ended well, {state}:\n{self.pane}"
            time.sleep(0.05)

    def close(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True, check=False)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(fake=False) as running:
        yield running


def _terminal(daemon: Daemon, folder: Path, *arguments: str, size: tuple[int, int] = (80, 24), **more: str) -> Terminal:
    own = os.environ | {"LOCALRUN_HOME": str(folder / "home"), "LOCALRUN_PORT": str(daemon.port)} | more
    wanted = ("LOCALRUN_HOME", "LOCALRUN_PORT", "PATH", "HOME", *more)
    command = [sys.executable, "-m", "localrun", *arguments]
    return Terminal(folder, command, {name: own[name] for name in wanted}, size)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(daemon: Daemon, tmp_path: Path, number: signal.Signals) -> None:
    terminal = _terminal(daemon, tmp_path)
    try:
        terminal.see("Enter asks")
        assert terminal.told("#{alternate_on},#{mouse_any_flag}") == "1,1"
        os.kill(int(terminal.told("#{pane_pid}")), number)
        terminal.see_it_end()
        assert terminal.told("#{alternate_on},#{mouse_any_flag}") == "0,0"
    finally:
        terminal.close()


def test_bytes_that_are_not_utf_8_end_nothing(daemon: Daemon, tmp_path: Path) -> None:
    with contextlib.closing(_terminal(daemon, tmp_path)) as terminal:
        terminal.see("Enter asks")
        terminal.press("-H", "e9")
        terminal.type("and on")
        terminal.see("\ufffdand on")


@pytest.mark.parametrize("number", [None, signal.SIGHUP])
def test_a_draft_is_there_at_the_next_start(daemon: Daemon, tmp_path: Path, number: signal.Signals | None) -> None:
    with contextlib.closing(_terminal(daemon, tmp_path)) as first:
        first.see("Enter asks")
        first.type("half a question")
        first.see("half a question")
        if number is None:
            first.press("C-q")
        else:
            os.kill(int(first.told("#{pane_pid}")), number)
        first.see_it_end()
    with contextlib.closing(_terminal(daemon, tmp_path, size=(40, 20))) as second:
        second.see("half a question")
        second.see("^g Help")


@pytest.mark.parametrize("key", ["x", "b"])
def test_escape_that_comes_with_another_key_stops(tmp_path: Path, key: str) -> None:
    with (
        calling_daemon(tmp_path / "models", TOOL_TEMPLATE, kv_cells=16384) as running,
        contextlib.closing(_terminal(running, tmp_path)) as terminal,
    ):
        terminal.see("Enter asks")
        terminal.paste(f"SAY[[{'word ' * 2000}]]")
        terminal.press("Enter")
        terminal.see("tok/s")  # the question has the same words
        terminal.press("Escape", key)
        terminal.see("● stopped")
        terminal.see(f"│ {key} ")
        terminal.paste("\x1b[31mred\x1b[0m \x11 x")
        terminal.see(f"{key}[31mred[0m")


def test_after_a_stop_the_screen_is_drawn_anew(daemon: Daemon, tmp_path: Path) -> None:
    with contextlib.closing(_terminal(daemon, tmp_path)) as terminal:
        terminal.see("Enter asks")
        os.kill(int(terminal.told("#{pane_pid}")), signal.SIGTSTP)  # tmux continues it at once
        deadline_s = time.monotonic() + PATIENCE_S
        while "again" not in terminal.pane and time.monotonic() < deadline_s:
            terminal.type("again ")  # what is typed while it stops is lost
            time.sleep(0.2)
        terminal.see("again")
        terminal.see("F2 Monitor")


def test_ask_look_at_the_monitor_resize_and_leave(daemon: Daemon, tmp_path: Path) -> None:
    terminal = _terminal(daemon, tmp_path)
    try:
        terminal.see("Enter asks")
        terminal.press("Enter")
        terminal.see("● done")
        assert "fox" in terminal.pane
        terminal.see("TTFT")
        terminal.type("What is 3 + 4?")
        terminal.press("Enter")
        terminal.resize(100, 30)
        terminal.see("^q Quit")
        terminal.press("F2")
        terminal.see("decode tok/s")
        terminal.see("this chat")
        terminal.press("F4")
        terminal.see("level debug and above")
        terminal.press("F1")
        terminal.see("● done")
        terminal.press("C-q")
        terminal.see_it_end()
        assert "Traceback" not in terminal.pane
    finally:
        terminal.close()


def test_a_picture_dropped_on_a_model_that_cannot_see_is_text(daemon: Daemon, tmp_path: Path) -> None:
    terminal = _terminal(daemon, tmp_path, size=(160, 40))
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(terminal):  # a path that fits on a line
        picture = Path(folder, "fox.png")
        picture.write_bytes(b"\x89PNG\r\n\x1a\n")
        terminal.see("● ready")
        terminal.drop(picture)
        terminal.see("fox.png: tiny cannot see pictures")
        terminal.see("fox.png'")  # the end of its path, in the prompt


def test_top_opens_the_monitor_and_says_that_the_daemon_is_idle(daemon: Daemon, tmp_path: Path) -> None:
    terminal = _terminal(daemon, tmp_path, "top")
    try:
        terminal.see("decode tok/s")
        terminal.see("F2 Monitor")
        terminal.press("q", "C-q")
        terminal.see_it_end()
    finally:
        terminal.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"NO_COLOR": "1", "COLORTERM": "truecolor"},
        {"TERM": "xterm", "COLORTERM": ""},
        {"NO_COLOR": "1", "TERM": "xterm", "COLORTERM": ""},
    ],
)
def test_without_colours_and_with_sixteen_it_reads_as_well(
    daemon: Daemon, tmp_path: Path, settings: dict[str, str]
) -> None:
    terminal = _terminal(daemon, tmp_path, **settings)
    try:
        terminal.see("Enter asks")
        terminal.see("● ready")
        colours = re.findall(r"[34]8;2;(\d+);(\d+);(\d+)", terminal.colours)
        if "NO_COLOR" in settings:
            assert all(len(set(colour)) == 1 for colour in colours), "a hue was sent, not a shade of grey"
            assert not re.search(r"\x1b\[(3|4|9)[1-6]m", terminal.colours)
            assert settings.get("TERM") != "xterm" or "\x1b[97m" in terminal.colours, "all is black on black"
        else:
            assert not colours, "true colour was sent to a terminal that has sixteen"
        terminal.press("F2")
        terminal.see("decode tok/s")
        terminal.press("C-q")
        terminal.see_it_end()
    finally:
        terminal.close()


def test_ctrl_r_starts_a_daemon_that_was_stopped(tmp_path: Path) -> None:
    with running_daemon(fake=False) as first:
        terminal = _terminal(first, tmp_path, size=(100, 30))
        try:
            terminal.see("● ready")
            terminal.type("draft")
            first.stop()
            terminal.see("No daemon at")
            terminal.press("C-r")
            terminal.see("● ready")
            terminal.see("draft")
            assert "No daemon" not in terminal.pane
            terminal.press("C-q")
            terminal.see_it_end()
        finally:
            terminal.close()
            settings = os.environ | {"LOCALRUN_HOME": str(tmp_path / "home"), "LOCALRUN_PORT": str(first.port)}
            stop = [sys.executable, "-m", "localrun", "stop", "--daemon"]
            subprocess.run(stop, env=settings, capture_output=True, check=False)


# What renderers like to swallow, with numbers that are seen once each.
SAID = """\
Use `101` Vec<102> and <103>, if a <104 and c> 105. Not \\(106\\), 107*108*109, **110** and _111_.
roses 112
violets 113

<answer>
114
</answer>

| a 115 | b |
|---|---|
| 116<br>117 | <118> |

[note 119]: 120

```python
def f(x: list[121]) -> "<122>":
    return x * 123
```

<style>
body {124}

- 125 <!-- 126 -->
- last 127"""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with calling_daemon(tmp_path_factory.mktemp("models"), TOOL_TEMPLATE, kv_cells=65536) as running:
        yield running


def _words(text: str) -> list[str]:
    return re.findall(r"(?<!\d)1[0-2]\d(?!\d)", text)


def test_what_the_model_said_is_what_is_seen_copied_and_stored(scripted: Daemon, tmp_path: Path) -> None:
    with contextlib.closing(_terminal(scripted, tmp_path, size=(100, 90))) as terminal:
        terminal.see("Enter asks")
        terminal.type("/model caller")
        terminal.press("Enter")
        terminal.see("caller answers in this chat")
        terminal.paste(f"SAY[[{SAID}]]")
        terminal.see("last 127]]")
        terminal.press("Enter")
        terminal.see("● done")
        terminal.see("• last 127")
        assert sorted(_words(terminal.pane.partition("]]")[2])) == _words(SAID)
        terminal.press("C-y")
        terminal.see("Copied")
        assert terminal.clipboard == SAID
        terminal.press("C-q")
        terminal.see_it_end()
    assert _stored(tmp_path) == SAID


def test_run_shows_what_the_model_said(scripted: Daemon, tmp_path: Path) -> None:
    with contextlib.closing(_terminal(scripted, tmp_path, "run", "caller", size=(100, 90))) as terminal:
        terminal.see(">>>")
        terminal.paste(f"SAY[[{SAID}]]")
        terminal.see("last 127]]")
        terminal.press("Enter")
        terminal.see("- last 127\n")
        shown = terminal.pane.partition("]]")[2]
        assert [line.rstrip() for line in shown.splitlines()[1:]][: SAID.count("\n") + 1] == SAID.splitlines()


def test_a_terminal_that_vanishes_ends_the_app_and_the_answer_so_far_is_kept(tmp_path: Path) -> None:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="20", LOCALRUN_FAKE_ENDLESS="1") as slow:
        terminal = _terminal(slow, tmp_path)
        terminal.see("Enter asks")
        terminal.press("Enter")
        terminal.see("● decoding")
        process = psutil.Process(int(terminal.told("#{pane_pid}")))
        terminal.close()
        process.wait(PATIENCE_S)
    assert _stored(tmp_path)


def _stored(folder: Path) -> str:
    """The last answer that is stored."""
    (path,) = folder.rglob("chats.db")
    with contextlib.closing(sqlite3.connect(path)) as chats:
        ((text,),) = chats.execute("SELECT content FROM messages WHERE role = 'assistant' ORDER BY id DESC LIMIT 1")
    assert isinstance(text, str)
    return text


def test_a_recording_is_replayed_once_and_again_when_asked(daemon: Daemon, tmp_path: Path) -> None:
    recording = tmp_path / "recorded.jsonl"
    snapshot = daemon.http.get("/localrun/v1/snapshot").json()
    recorder = Recorder(recording)
    recorder.write(msgspec.convert(snapshot, Snapshot))
    recorder.close()
    terminal = _terminal(daemon, tmp_path, "top", "--replay", str(recording), size=(100, 30))
    try:
        terminal.see("the recording is over")
        terminal.press("C-r")
        terminal.see("the recording is over")
        assert "No daemon" not in terminal.pane
    finally:
        terminal.close()
