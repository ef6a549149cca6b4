"""`localrun run --tools`: at a terminal it asks, and without one only what was named runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.clients.real_daemons import TOOL_TEMPLATE
from tests.daemon import Daemon, calling_daemon

SERVERS = Path(__file__).parents[1] / "tools"
_END = "</tool_response>"
TEMPLATE = TOOL_TEMPLATE.replace(_END, "{% if 'SAY[[' not in message.content %} SAY[[It is done.]]{% endif %}" + _END)
ADD = 'SAY[[<tool_call>\n{"name": "sums__add", "arguments": {"a": 19, "b": 23}}\n</tool_call>]]'
HANG = 'SAY[[<tool_call>\n{"name": "hostile__hang", "arguments": {}}\n</tool_call>]]'
DIE = 'SAY[[<tool_call>\n{"name": "hostile__die", "arguments": {}}\n</tool_call>]]'


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with calling_daemon(tmp_path_factory.mktemp("models"), TEMPLATE, kv_cells=65536) as running:
        yield running


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With three servers in `tui.toml`, one of which is not there."""
    home = tmp_path / "home"
    (home / "config").mkdir(parents=True)
    path = json.dumps(":".join(path for path in sys.path if path))
    own = {name: value for name, value in os.environ.items() if not name.startswith("LOCALRUN_")}
    (home / "config" / "tui.toml").write_text(f"""
theme = "localrun-light"
[mcp.sums]
command = {json.dumps(sys.executable)}
args = [{json.dumps(str(SERVERS / "arithmetic_server.py"))}]
env = {{PYTHONPATH = {path}}}
[mcp.hostile]
command = {json.dumps(sys.executable)}
args = [{json.dumps(str(SERVERS / "hostile_server.py"))}]
env = {{PYTHONPATH = {path}, SEEN = {json.dumps(str(tmp_path / "seen"))}}}
[mcp.gone]
command = "/nowhere/server"
""")
    return own | {"LOCALRUN_HOME": str(home)}


def _run(environment: dict[str, str], daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "localrun", "run", "caller", *arguments, "--port", str(daemon.port)],
        env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip


def test_without_a_terminal_only_what_is_named_runs(environment: dict[str, str], daemon: Daemon) -> None:
    refused = _run(environment, daemon, ADD, "--tools", "sums")
    assert (refused.returncode, refused.stdout) == (0, "It is done.\n")
    assert "sums · add not allowed" in refused.stderr
    allowed = _run(environment, daemon, ADD, "--tools=sums", "--allow-tool", "sums__add", "--json")
    answer: dict[str, Any] = json.loads(allowed.stdout)
    assert answer["text"] == "It is done."
    assert "sums · add done: 42" in allowed.stderr


def test_a_name_that_is_none_is_said(environment: dict[str, str], daemon: Daemon) -> None:
    server = _run(environment, daemon, "--tools", "what is 1 + 1?")
    assert server.returncode == 2
    assert "there are sums, hostile, gone. Before a prompt write --tools=all" in " ".join(server.stderr.split())
    tool = _run(environment, daemon, "hello", "--tools", "sums", "--allow-tool", "sums__power")
    assert tool.returncode != 0
    assert "there is no tool 'sums__power'; there are sums__add, sums__divide" in tool.stderr
    alone = _run(environment, daemon, "hello", "--allow-tool", "sums__add")
    assert "--allow-tool needs --tools" in alone.stderr


def test_a_server_that_is_not_there_or_dies_is_said_and_the_answer_goes_on(
    environment: dict[str, str], daemon: Daemon
) -> None:
    ended = _run(environment, daemon, DIE, "--tools", "--allow-tool", "hostile__die")
    assert (ended.returncode, ended.stdout) == (0, "It is done.\n")
    assert "/nowhere/server cannot be started" in ended.stderr
    assert "hostile · die failed: the server hostile has ended; it said: the disk is on fire" in ended.stderr


def test_at_a_terminal_it_asks(environment: dict[str, str], daemon: Daemon) -> None:
    pytest.importorskip("pty", reason="needs pseudo terminals")
    from tests.cli.test_repl import Conversation

    typed = f'"""{ADD}"""\n'
    with closing(Conversation(environment, daemon.port, "caller", "--tools", "sums")) as conversation:
        conversation.wait_for(">>> ")
        conversation.type(typed)
        shown = conversation.wait_for("never: ")
        assert '"a": 19' in shown
        conversation.type("\n")  # no answer is no
        assert "sums · add not allowed" in conversation.wait_for(">>> ")
        conversation.type(typed)
        conversation.wait_for("never: ")
        conversation.type("a\n")
        assert "sums · add done: 42" in conversation.wait_for(">>> ")
        conversation.type(typed)
        assert "never: " not in conversation.wait_for("sums · add done: 42")
        conversation.wait_for(">>> ")
        conversation.type("/tools\n")
        assert "sums__add  allowed in this chat  Add two numbers." in conversation.wait_for("Divide")
        conversation.wait_for(">>> ")
        conversation.type("/bye\n")
        assert conversation.process.wait(60) == 0


def test_ctrl_c_ends_a_call_at_its_server_and_the_conversation_goes_on(
    environment: dict[str, str], daemon: Daemon, tmp_path: Path
) -> None:
    pytest.importorskip("pty", reason="needs pseudo terminals")
    from tests.cli.test_repl import Conversation

    seen = tmp_path / "seen"
    with closing(Conversation(environment, daemon.port, "caller", "--tools", "hostile")) as conversation:
        conversation.wait_for(">>> ")
        conversation.type(f'"""{HANG}"""\n')
        conversation.wait_for("never: ")
        conversation.type("y\n")
        _wait_for(seen, "hangs")
        conversation.interrupt_until(">>> ")
        _wait_for(seen, "cancelled")
        conversation.type("SAY[[here]]\n")
        conversation.wait_for("here\r\n")
        conversation.type("/bye\n")
        assert conversation.process.wait(60) == 0


def _wait_for(file: Path, text: str) -> None:
    deadline_s = time.monotonic() + 60
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < deadline_s, text
        time.sleep(0.05)


def test_ctrl_c_at_the_question_refuses_and_the_conversation_goes_on(
    environment: dict[str, str], daemon: Daemon
) -> None:
    pytest.importorskip("pty", reason="needs pseudo terminals")
    from tests.cli.test_repl import Conversation

    with closing(Conversation(environment, daemon.port, "caller", "--tools", "sums")) as conversation:
        conversation.wait_for(">>> ")
        conversation.type(f'"""{ADD}"""\n')
        conversation.wait_for("never: ")
        conversation.interrupt_until(">>> ")
        conversation.type("SAY[[here]]\n")
        conversation.wait_for("here\r\n")
        conversation.type("/bye\n")
        assert conversation.process.wait(60) == 0
