"""Tools in the chat: real servers of the SDK, screens by keys, a real daemon whose fake engine says what it is told.

`SAY[[text]]` in a question makes the next answer that text, and so does one in a tool's result. After a result without
one the model says `done`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from localrun.last_model import remember_model
from localrun.tools.config import ServerSettings
from localrun.tui.app import LocalrunApp
from localrun.tui.files import Question
from localrun.tui.history import Message
from localrun.tui.preferences import Preferences
from localrun.tui.widgets.prompt import Prompt
from localrun.tui.widgets.tool_calls import Choices
from tests.clients.real_daemons import TOOL_TEMPLATE
from tests.daemon import Daemon, calling_daemon

SERVERS = Path(__file__).parents[1] / "tools"
SIZE = (110, 40)
_END = "</tool_response>"
TEMPLATE = TOOL_TEMPLATE.replace(_END, "{% if 'SAY[[' not in message.content %} SAY[[done]]{% endif %}" + _END)


def said(*calls: tuple[str, dict[str, Any]]) -> str:
    """What makes the model call these."""
    blocks = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    ]
    return f"SAY[[{chr(10).join(blocks)}]]"


ADD = said(("arithmetic__add", {"a": 19, "b": 23}))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with calling_daemon(tmp_path_factory.mktemp("models"), TEMPLATE, kv_cells=131072) as running:
        yield running


class Tools:
    """The app with these servers, on one history and one file of permissions."""

    def __init__(self, desk: Any, daemon: Daemon, folder: Path) -> None:
        self.desk, self.daemon, self.folder = desk, daemon, folder
        self.seen_file = folder / "seen"
        self.files = folder / "files"
        self.files.mkdir()
        self.servers = {
            "arithmetic": self.server("arithmetic_server.py"),
            "files": self.server("files_server.py", str(self.files)),
            "hostile": self.server("hostile_server.py"),
        }

    def server(self, name: str, *arguments: str, **settings: Any) -> ServerSettings:
        path = ":".join(path for path in sys.path if path)
        return ServerSettings(
            command=sys.executable, args=(str(SERVERS / name), *arguments),
            env={"PYTHONPATH": path, "SEEN": str(self.seen_file)}, **settings,
        )  # fmt: skip

    @asynccontextmanager
    async def open(self, *names: str, size: tuple[int, int] = SIZE) -> AsyncIterator[Any]:
        last_model_file = self.folder / "last-model"
        remember_model(last_model_file, "caller")
        app = self.desk.app = LocalrunApp(
            self.daemon.url,
            last_model_file=last_model_file,
            history_file=self.folder / "chats.db",
            permissions_file=self.folder / "permissions.json",
            preferences=Preferences(servers={name: self.servers[name] for name in names}),
        )
        async with app.run_test(size=size, notifications=True) as pilot:
            await self.desk.see(pilot, "● ready")
            yield pilot

    async def ask(self, pilot: Any, question: str) -> None:
        pilot.app.screen.query_one(Prompt).put(question)
        await pilot.press("enter")

    async def asked(self, pilot: Any) -> None:
        """Waits until a call is asked for, and the safe answer is marked."""
        await self.until(pilot, lambda: pilot.app.screen.query(Choices))
        choices = pilot.app.screen.query_one(Choices)
        await self.until(pilot, lambda: choices.has_focus)
        assert choices.highlighted == 0

    async def choose(self, pilot: Any, *, down: int) -> None:
        await self.asked(pilot)
        await pilot.press(*["down"] * down, "enter")

    async def answered(self, pilot: Any) -> None:
        await self.until(pilot, lambda: self.messages and not pilot.app.screen.view.is_answering)

    async def until(self, pilot: Any, condition: Callable[[], object]) -> None:
        try:
            await self.desk.until(pilot, condition)
        except TimeoutError:
            pytest.fail(f"it did not come about on:\n{self.desk.seen(self.desk.app)}")

    @property
    def messages(self) -> list[Message]:
        history = self.desk.app.session.history
        chats = history.chats()
        return history.branch(chats[0].id) if chats else []

    @property
    def results(self) -> list[Message]:
        return [message for message in self.messages if message.role == "tool"]

    def pids(self) -> list[int]:
        lines = self.seen_file.read_text().splitlines() if self.seen_file.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith("pid ")]


@pytest.fixture
def tools(desk: Any, daemon: Daemon, tmp_path: Path) -> Tools:
    return Tools(desk, daemon, tmp_path)


async def test_a_call_is_shown_asked_for_run_and_its_result_goes_back_to_the_model(tools: Tools) -> None:
    async with tools.open("arithmetic") as pilot:
        (tools.files / "x").write_text("")
        await tools.ask(pilot, ADD)
        await tools.asked(pilot)
        screen = tools.desk.seen(tools.desk.app)
        assert '"a": 19' in screen
        assert "arithmetic · add" in screen
        assert "Add two numbers." in screen
        assert tools.results == []  # nothing runs before it is allowed
        await pilot.press("down", "enter")
        await tools.answered(pilot)
        user, call, result, answer = tools.messages
        assert (user.role, call.role, result.role, answer.role) == ("user", "assistant", "tool", "assistant")
        assert result.content == "42"
        assert result.extra["end"] == "done"
        assert call.extra["tool_calls"][0]["id"] == result.extra["tool_call_id"]
        assert pilot.app.focused is pilot.app.screen.query_one(Prompt)
        assert not pilot.app.screen.query(Choices)
    assert not [p for p in psutil.Process().children(recursive=True) if "arithmetic_server" in " ".join(p.cmdline())]


async def test_enter_in_haste_refuses_and_nothing_runs(tools: Tools) -> None:
    async with tools.open("arithmetic") as pilot:
        await tools.ask(pilot, ADD)
        await tools.choose(pilot, down=0)
        await tools.answered(pilot)
        (result,) = tools.results
        assert result.extra["end"] == "refused"
        assert "did not allow" in result.content
        assert "not allowed" in tools.desk.seen(tools.desk.app)
        # What is typed keeps the focus, and letters answer nothing.
        pilot.app.screen.query_one(Prompt).put("yes")
        pilot.app.screen.view.ask(Question(ADD))
        await tools.desk.see(pilot, "asks above whether it may call a tool")
        await pilot.press("y", "a")
        assert pilot.app.screen.query_one(Prompt).text == "yesya"
        assert len(tools.results) == 1


async def test_always_counts_in_this_chat_or_for_good_and_never_takes_the_tool_away(tools: Tools) -> None:
    async with tools.open("arithmetic") as pilot:
        await tools.ask(pilot, ADD)
        await tools.choose(pilot, down=2)  # in this chat
        await tools.answered(pilot)
        await tools.ask(pilot, ADD)
        await tools.until(pilot, lambda: len(tools.results) == 2)
        await tools.answered(pilot)
        await pilot.press("ctrl+n")
        await tools.ask(pilot, ADD)
        await tools.choose(pilot, down=3)  # for good
        await tools.answered(pilot)
        await pilot.press("ctrl+n")
        await tools.ask(pilot, said(("arithmetic__divide", {"a": 1, "b": 0})))
        await tools.choose(pilot, down=4)  # never
        await tools.answered(pilot)
        assert tools.results[0].extra["end"] == "refused"
    async with tools.open("arithmetic") as pilot:  # stored
        await tools.ask(pilot, ADD)
        await tools.until(pilot, lambda: [r.content for r in tools.results] == ["42"])
        await tools.answered(pilot)
        assert [tool.own_name for tool in tools.desk.app.session.toolbox.offered()] == ["add"]
    # A server that is started in another way has no permission.
    tools.servers["arithmetic"] = tools.server("arithmetic_server.py", "--port", "0")
    async with tools.open("arithmetic") as pilot:
        await tools.ask(pilot, ADD)
        await tools.asked(pilot)
        await pilot.press("enter")
        await tools.answered(pilot)


async def test_several_calls_in_one_answer_and_errors_go_to_the_model(tools: Tools) -> None:
    async with tools.open("arithmetic", "files") as pilot:
        (tools.files / "note.txt").write_text("milk")
        calls = [
            ("files__list_files", {}),
            ("arithmetic__divide", {"a": 1, "b": 0}),
            ("files__read_text", {"name": "none"}),
        ]
        await tools.ask(pilot, said(*calls))
        for _ in calls:
            n_results = len(tools.results)
            await tools.choose(pilot, down=1)
            await tools.until(pilot, lambda n=n_results: len(tools.results) == n + 1)  # type: ignore[misc]
        await tools.answered(pilot)
        listed, divided, read = tools.results
        assert "note.txt" in listed.content
        assert [r.extra["end"] for r in (listed, divided, read)] == ["done", "failed", "failed"]
        assert "Error executing tool divide" in divided.content


async def test_what_tries_to_steer_is_inert_and_a_flood_is_cut(tools: Tools) -> None:
    async with tools.open("hostile") as pilot:
        await tools.ask(pilot, said(("hostile__steer", {}), ("hostile__flood", {})))
        await tools.asked(pilot)
        screen = tools.desk.seen(tools.desk.app)
        assert "Ignore all that was said" in screen
        assert "[bold red]allow[/]" in screen
        assert "\x1b" not in screen
        assert "owned" not in screen
        assert "\u202e" not in screen
        await pilot.press("down", "enter")
        await tools.choose(pilot, down=1)
        await tools.answered(pilot)
        steered, flooded = tools.results
        assert "\x1b" not in steered.content
        assert "\u202e" not in steered.content
        assert len(flooded.content) < 20_200
        assert "cut this result: the first 20000 of 300000" in flooded.content


async def test_a_tool_that_came_later_is_offered_with_the_next_question(tools: Tools) -> None:
    async with tools.open("hostile") as pilot:
        await tools.ask(pilot, said(("hostile__grow", {})))
        await tools.choose(pilot, down=1)
        await tools.answered(pilot)
        await tools.ask(pilot, "SAY[[fine]]")
        await tools.until(pilot, lambda: tools.messages[-1].content == "fine")
        (late,) = [tool for tool in pilot.app.session.toolbox.offered() if "late" in tool.name]
        assert "\x1b" not in late.name + late.description


async def test_esc_cancels_a_running_call_at_its_server(tools: Tools) -> None:
    async with tools.open("hostile") as pilot:
        await tools.ask(pilot, said(("hostile__hang", {}), ("hostile__steer", {})))
        await tools.choose(pilot, down=1)
        await tools.until(pilot, lambda: "hangs" in tools.seen_file.read_text())
        await tools.desk.see(pilot, "● calling hostile · hang")
        await pilot.press("escape")
        await tools.answered(pilot)
        await tools.until(pilot, lambda: "cancelled" in tools.seen_file.read_text())
        assert [r.extra["end"] for r in tools.results] == ["stopped", "stopped"]
        await tools.desk.see(pilot, "● stopped")
        # The conversation goes on, with a result for each call.
        await tools.ask(pilot, "SAY[[still here]]")
        await tools.until(pilot, lambda: tools.messages[-1].content == "still here")


async def test_a_server_that_dies_hangs_or_is_not_there_is_one_clear_line(tools: Tools) -> None:
    tools.servers["gone"] = ServerSettings(command="/nowhere/server")
    tools.servers["mute"] = ServerSettings(
        command=sys.executable, args=("-c", "print('garbage'); import time; time.sleep(3600)"), timeout_s=2
    )
    tools.servers["hostile"] = tools.server("hostile_server.py", timeout_s=30)
    async with tools.open("gone", "mute", "hostile") as pilot:
        await tools.ask(pilot, said(("hostile__die", {})))
        await tools.choose(pilot, down=1)
        await tools.answered(pilot)
        screen = tools.desk.seen(tools.desk.app)
        assert "/nowhere/server cannot be started" in screen
        assert "the server mute did not answer within 2 s" in screen
        (result,) = tools.results
        assert result.extra["end"] == "failed"
        assert "the disk is on fire / ended with status 7" in result.content
        # It is started again with the next question; the others are not tried again.
        await tools.ask(pilot, said(("hostile__steer", {})))
        await tools.choose(pilot, down=1)
        await tools.until(pilot, lambda: [r.extra["end"] for r in tools.results] == ["failed", "done"])
        await tools.answered(pilot)
        assert len(tools.pids()) == 2


async def test_a_call_beyond_its_time_is_cancelled(tools: Tools) -> None:
    tools.servers["hostile"] = tools.server("hostile_server.py", timeout_s=8)
    async with tools.open("hostile") as pilot:
        await tools.ask(pilot, said(("hostile__hang", {})))
        await tools.choose(pilot, down=1)
        await tools.answered(pilot)
        (result,) = tools.results
        assert "no answer within 8 s" in result.content
        assert result.extra["end"] == "failed"
        await tools.until(pilot, lambda: "cancelled" in tools.seen_file.read_text())


async def test_a_server_that_ignores_its_end_and_leaves_a_child_is_gone_with_the_app(tools: Tools) -> None:
    tools.servers["hostile"] = tools.server("hostile_server.py", "--stays", "--child")
    async with tools.open("hostile") as pilot:
        await tools.ask(pilot, said(("hostile__steer", {})))
        await tools.choose(pilot, down=1)
        await tools.answered(pilot)
        pids = tools.pids()
        assert len(pids) == 2
        assert all(map(psutil.pid_exists, pids))
    assert not any(map(_is_alive, pids))


async def test_after_so_many_rounds_a_person_is_asked(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrun.tui.widgets.conversation_view.MAX_ROUNDS", 2)
    async with tools.open("files") as pilot:
        call = said(("files__read_text", {"name": "again"}))
        (tools.files / "again").write_text(call)
        await tools.ask(pilot, call)
        await tools.choose(pilot, down=2)
        await tools.desk.see(pilot, "has called tools in 2 rounds")
        await tools.asked(pilot)
        assert len(tools.results) == 2
        await pilot.press("down", "enter")  # goes on
        await tools.until(pilot, lambda: len(tools.results) == 4)
        await tools.choose(pilot, down=0)
        await tools.answered(pilot)
        assert len(tools.results) == 4
        assert tools.messages[-1].role == "tool"


async def test_pictures_are_kept_and_a_model_that_cannot_see_is_told(tools: Tools) -> None:
    async with tools.open("files") as pilot:
        Image.new("RGB", (40, 30), "red").save(tools.files / "red.png")
        await tools.ask(pilot, said(("files__read_picture", {"name": "red.png"})))
        await tools.choose(pilot, down=1)
        await tools.answered(pilot)
        (result,) = tools.results
        (medium,) = result.extra["media"]
        assert (medium["width"], medium["height"]) == (40, 30)
        await tools.desk.see(pilot, "read_picture 1")
        conversation = pilot.app.screen.view.conversation
        blind = conversation.to_send(frozenset())[2]
        assert "images" not in blind
        assert "1 of this result's pictures are not shown to you" in blind["content"]
        assert len(conversation.to_send()[2]["images"]) == 1


async def test_a_chat_with_calls_is_resumed_exported_edited_and_asked_again(tools: Tools, tmp_path: Path) -> None:
    async with tools.open("arithmetic") as pilot:
        await tools.ask(pilot, ADD)
        await tools.choose(pilot, down=2)
        await tools.answered(pilot)
    async with tools.open("arithmetic") as pilot:
        await pilot.press("ctrl+l", "enter")
        await tools.desk.see(pilot, "arithmetic · add")
        await tools.desk.see(pilot, "Result, 2 characters")
        for name in ("chat.md", "chat.json"):
            await tools.ask(pilot, f"/export {tmp_path / name}")
            await tools.until(pilot, (tmp_path / name).exists)
        markdown = (tmp_path / "chat.md").read_text()
        assert 'Calls arithmetic__add with\n\n```\n{"a": 19, "b": 23}\n```' in markdown
        assert "42" in markdown
        exported = json.loads((tmp_path / "chat.json").read_text())
        assert [m["role"] for m in exported["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert "tools" not in exported["options"]
        before = tools.messages
        await tools.ask(pilot, "/retry")
        await tools.until(pilot, lambda: tools.messages[-1].id > before[-1].id)  # allowed in this chat: not asked
        await tools.answered(pilot)
        assert [m.role for m in tools.messages] == ["user", "assistant", "tool", "assistant"]
        await tools.ask(pilot, "/edit")
        await tools.until(pilot, lambda: pilot.app.screen.query_one(Prompt).text == ADD)
        await tools.ask(pilot, "SAY[[no tools]]")
        await tools.until(pilot, lambda: [m.content for m in tools.messages][1:] == ["no tools"])


async def test_a_call_that_was_lost_with_the_program_has_a_result_for_the_model(tools: Tools) -> None:
    async with tools.open("arithmetic") as pilot:
        await tools.ask(pilot, ADD)
        await tools.asked(pilot)
    path = tools.folder / "chats.db"
    with sqlite3.connect(path) as db:
        roles = [role for (role,) in db.execute("SELECT role FROM messages ORDER BY id")]
    assert roles == ["user", "assistant", "tool"]  # quitting while it was asked for
    with sqlite3.connect(path) as db:  # as a kill leaves it
        db.execute("UPDATE chats SET leaf_id = 2")
        db.execute("DELETE FROM messages WHERE role = 'tool'")
    async with tools.open("arithmetic") as pilot:
        await pilot.press("ctrl+l", "enter")
        await tools.desk.see(pilot, "calls arithmetic__add")
        conversation = pilot.app.screen.view.conversation
        conversation.asked("SAY[[ok]]")
        sent = conversation.to_send()
        assert [m["role"] for m in sent] == ["user", "assistant", "tool", "user"]
        assert sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"]
        await tools.ask(pilot, "SAY[[ok]]")
        await tools.until(pilot, lambda: tools.messages[-1].content == "ok")


async def test_the_list_of_tools_says_what_is_on_and_what_was_allowed(tools: Tools) -> None:
    async with tools.open("arithmetic", "files") as pilot:
        await tools.ask(pilot, "/tools")
        await tools.desk.see(pilot, "list_files")
        await tools.desk.see(pilot, "asks each time")
        await pilot.press("down", "enter")  # arithmetic · add
        await tools.desk.see(pilot, "off")
        await pilot.press("escape")
        await tools.ask(pilot, said(("arithmetic__add", {"a": 1, "b": 2})))
        await tools.choose(pilot, down=0)  # a model cannot call what it is not offered
        await tools.answered(pilot)
        assert "add" not in [m.extra["tool"] for m in tools.results]
        await tools.ask(pilot, said(("files__list_files", {})))
        await tools.choose(pilot, down=3)
        await tools.answered(pilot)
        await tools.ask(pilot, "/tools")
        await tools.desk.see(pilot, "allowed always")
        await pilot.press("end", "up", "up", "ctrl+d")
        await tools.until(pilot, lambda: "allowed always" not in tools.desk.seen(tools.desk.app))
        await pilot.press("escape")
        await tools.ask(pilot, "/tools off")
        await tools.desk.see(pilot, "Tools are off in this chat")
        await tools.ask(pilot, "SAY[[plain]]")
        await tools.until(pilot, lambda: tools.messages[-1].content == "plain")


async def test_a_model_that_cannot_call_tools_is_offered_none_and_no_server_is_started(tools: Tools) -> None:
    async with tools.open("hostile") as pilot:
        await tools.ask(pilot, "/model tiny")
        await tools.desk.see(pilot, "tiny answers in this chat")
        await tools.ask(pilot, "SAY[[hello]]")
        await tools.until(pilot, lambda: tools.messages and tools.messages[-1].content == "hello")
        assert tools.pids() == []


async def test_a_server_over_http(tools: Tools) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = tools.servers["arithmetic"]
    process = subprocess.Popen(  # noqa: ASYNC220
        [server.command, *server.args, "--port", str(port)], env=server.env, stderr=subprocess.DEVNULL
    )
    try:
        deadline_s = time.monotonic() + 60
        while not _listens(port):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)
        tools.servers["sums"] = ServerSettings(url=f"http://127.0.0.1:{port}/mcp")
        async with tools.open("sums") as pilot:
            await tools.ask(pilot, said(("sums__add", {"a": 20, "b": 22})))
            await tools.choose(pilot, down=1)
            await tools.answered(pilot)
            assert [r.content for r in tools.results] == ["42"]
            process.kill()
            process.wait()
            await tools.ask(pilot, said(("sums__add", {"a": 1, "b": 2})))
            await tools.answered(pilot) if not pilot.app.screen.query(Choices) else None
            await tools.until(pilot, lambda: pilot.app.screen.query(Choices) or not pilot.app.screen.view.is_answering)
            if pilot.app.screen.query(Choices):
                await tools.choose(pilot, down=1)
                await tools.answered(pilot)
                assert "sums" in tools.results[-1].content
                assert tools.results[-1].extra["end"] == "failed"
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
