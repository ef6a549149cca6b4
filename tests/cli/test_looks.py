"""What commands look like on a terminal: colours by meaning, words that are whole, columns that align."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.cli.conftest import CACHE, ENGINE, SHOWN, SNAPSHOT
from tests.cli.test_models import FIT

pytest.importorskip("pty", reason="needs pseudo terminals")

OnTerminal = Callable[..., str]


@pytest.fixture
def on_terminal(environment: dict[str, str], daemon) -> OnTerminal:
    """What a command writes to a terminal of so many columns."""
    import fcntl
    import pty
    import struct
    import termios

    def run(*arguments: str, n_columns: int = 80, **variables: str) -> str:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, n_columns, 0, 0))
        plain = {name: value for name, value in environment.items() if name not in ("NO_COLOR", "COLUMNS")}
        command = [sys.executable, "-m", "localrun", *arguments, "--port", str(daemon.port)]
        child = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=plain | {"TERM": "xterm"} | variables
        )
        os.close(slave)
        written = b""
        try:
            while piece := os.read(master, 65536):
                written += piece
        except OSError:  # the terminal of a program that has ended
            pass
        finally:
            os.close(master)
            child.wait(60)
        return written.decode().replace("\r\n", "\n")

    return run


def test_colours_are_for_a_terminal_that_wants_them(on_terminal, localrun, daemon):
    assert on_terminal("list").startswith("\x1b[1mNAME  ")
    assert "\x1b[2mModel\x1b[0m\n" in on_terminal("show", "tiny")
    assert on_terminal("show", "missing").startswith("\x1b[31merror:\x1b[0m model")
    assert "\x1b[2mExamples:\x1b[0m\n" in on_terminal("show", "--help")
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in on_terminal("list", **variables)
    assert "\x1b" not in localrun("list", port=daemon.port).stdout


def test_what_is_said_beside_an_answer_is_coloured_by_what_it_means(on_terminal, localrun, daemon):
    assert "\x1b[2mnote:\x1b[0m tiny is a toy; `localrun pull " in on_terminal("run", "hi there")
    daemon.answers["/api/tags"] = {"models": [], "unusable": [{"path": "/a.gguf", "problem": "is \x1b[1m damaged"}]}
    assert "\x1b[33mnot usable:\x1b[0m /a.gguf: is ␛[1m damaged\n" in on_terminal("list")
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert on_terminal("list", **variables).endswith("\nnot usable: /a.gguf: is ␛[1m damaged\n")
    assert localrun("list", port=daemon.port).stderr == "not usable: /a.gguf: is ␛[1m damaged\n"


@pytest.mark.parametrize("command", ["ps", "cache"])
def test_a_long_path_goes_without_its_middle(on_terminal, daemon, command: str):
    path = f"/home/{'folder/' * 12}a.gguf"
    daemon.answers["/localrun/v1/snapshot"] = SNAPSHOT | {"engines": [ENGINE | {"model": path}]}
    daemon.answers["/localrun/v1/cache"] = CACHE | {"models": [CACHE["models"][0] | {"model": path}]}
    assert "\n/…/a.gguf  " in on_terminal(command, TERM="dumb")


@pytest.mark.parametrize("n_columns", [60, 80])
def test_prose_is_wrapped_at_words(on_terminal, daemon, n_columns: int):
    daemon.answers["/localrun/v1/fit?model=tiny"] = FIT
    fit = on_terminal("show", "tiny", "--fit", n_columns=n_columns, TERM="dumb")
    error = on_terminal("show", "missing", n_columns=n_columns, TERM="dumb")
    kept = {"path": "/models/a.gguf", "reason": "it lies outside localrun's own files; delete it as any other file"}
    daemon.answers["/api/delete"] = {"freed_bytes": 0, "kept": [kept], "notes": []}
    removed = on_terminal("rm", "tiny", n_columns=n_columns, TERM="dumb")
    for text in (fit, error, removed):
        assert max(map(len, text.splitlines())) < n_columns
    assert FIT["notes"][0] in " ".join(fit.split())
    assert "`localrun search missing` looks for it elsewhere" in " ".join(error.split())


def test_names_and_values_of_a_model_stay_apart(localrun, daemon):
    path = "/models/a.gguf"
    memory = {"context": 4096, "total": 300_000_000, "weights": 200_000_000, "kv_cache": 50_000_000}
    more = {"path": path, "source": {"kind": "create", "file": path}, "memory": [memory]}
    daemon.shown = SHOWN | {"localrun": more | {"load": {"rope_frequency_scale": 0.2, "num_ctx": 4096}}}
    daemon.answers["/localrun/v1/fit?model=tiny"] = FIT
    shown = localrun("show", "tiny", port=daemon.port).stdout
    assert "  rope_frequency_scale  0.2\n  num_ctx               4096\n" in shown
    assert shown.count(path) == 1
    as_loaded, request = shown.partition("Memory\n")[2].splitlines()[:2]
    assert as_loaded.startswith("  needed when loaded         250 MB (weights 16 MB, KV cache 168 MB, the rest 66 MB)")
    assert request.startswith("  one request, 4,096 tokens  300 MB (weights 200 MB")


def test_a_narrow_terminal_has_long_values_below_their_names(on_terminal, daemon):
    memory = {"context": 4096, "total": 300_000_000, "weights": 200_000_000, "kv_cache": 50_000_000}
    daemon.shown = SHOWN | {"localrun": {"path": "/models/chat/tiny.gguf", "memory": [memory]}}
    shown = on_terminal("show", "tiny", n_columns=40, TERM="dumb")
    assert "  file\n    /models/chat/tiny.gguf\n" in shown
    wanted = "  one request, 4,096 tokens\n    300 MB (weights 200 MB, KV cache 50\n    MB, the rest 50 MB)\n"
    assert wanted in shown
    assert max(map(len, shown.splitlines())) < 40
