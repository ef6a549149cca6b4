"""The conversation at a real (pseudo) terminal."""

from __future__ import annotations

import base64
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localrun.cli import exits
from localrun.cli.answer import Stats
from localrun.cli.repl import Session, parse_options
from localrun.errors import BadRequest

pytest.importorskip("pty", reason="needs pseudo terminals")

TIMEOUT_S = 60.0

# Ctrl-C reaches only the processes of a terminal that is theirs, which the child has to take.
_IN_ITS_TERMINAL = """\
import fcntl, termios
from localrun.__main__ import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
main()
"""

# As a shell starts what ends in `&`.
_IN_THE_BACKGROUND = """\
import fcntl, os, termios
from localrun.__main__ import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if os.fork():
    os._exit(os.WIFSTOPPED(os.waitpid(-1, os.WUNTRACED)[1]))
os.setpgid(0, 0)
main()
"""


class Conversation:
    """`localrun run tiny` in a terminal of 80 by 24, unless that is narrower."""

    def __init__(
        self,
        environment: dict[str, str],
        port: int,
        model: str = "tiny",
        *arguments: str,
        n_columns: int = 80,
        kind: str = "xterm",
        program: str = _IN_ITS_TERMINAL,
    ) -> None:
        import fcntl
        import pty
        import struct
        import termios

        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, n_columns, 0, 0))

        own = {name: value for name, value in environment.items() if name != "COLUMNS"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "run", model, "--port", str(port), *arguments],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=own | {"TERM": kind},
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def wait_for(self, text: str) -> str:
        """Read until `text` comes; what came before it, and `text`."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while text not in self.seen:
            ready, _, _ = select.select([self._master], [], [], deadline_s - time.monotonic())
            assert ready, f"{text!r} did not come; seen: {self.seen!r}"
            try:
                self.seen += os.read(self._master, 65536).decode()
            except OSError:
                raise AssertionError(f"{text!r} did not come before the end; seen: {self.seen!r}") from None
        end = self.seen.index(text) + len(text)
        before, self.seen = self.seen[:end], self.seen[end:]
        return before

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt_until(self, text: str) -> None:
        self.signal_until(text, lambda: self.type("\x03"))

    def signal_until(self, text: str, signal: Callable[[], None]) -> None:
        """Again and again until `text` comes. At a prompt a signal may be lost: Python's readline does not see one that
        comes between its look for signals and its wait for a key. The next one waits, as one that comes while the last
        is dealt with is another case."""
        while text not in self.seen:
            signal()
            while text not in self.seen and select.select([self._master], [], [], 5)[0]:
                self.seen += os.read(self._master, 65536).decode()
        self.wait_for(text)

    def set_line_mode(self) -> None:
        """As a shell does when a program in it is stopped."""
        import termios

        modes = termios.tcgetattr(self._master)
        modes[3] |= termios.ICANON | termios.ECHO
        termios.tcsetattr(self._master, termios.TCSANOW, modes)

    def interrupt_while(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while condition():
            assert time.monotonic() < deadline_s, f"Ctrl-C changed nothing; seen: {self.seen!r}"
            self.type("\x03")
            time.sleep(0.5)

    def say(self, text: str) -> None:
        self.wait_for(">>> ")
        self.type(text + "\n")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def conversation(environment: dict[str, str], daemon) -> Iterator[Conversation]:
    opened = Conversation(environment, daemon.port)
    yield opened
    opened.close()


def test_two_turns_a_status_line_and_leaving(conversation, daemon):
    conversation.say("one")
    answer = conversation.wait_for("50.00 tokens/s, 5 tokens")
    assert "Hello there." in answer
    assert "\x1b[1;23r" in answer  # the last row is taken for the status line ...
    assert answer.index("\x1b[r") > answer.index("\x1b[1;23r")  # ... and given back
    conversation.say("two")
    conversation.wait_for("5 tokens")
    conversation.say("/bye")
    assert conversation.process.wait(TIMEOUT_S) == 0
    assert daemon.chats[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello there."},
        {"role": "user", "content": "two"},
    ]


def test_the_status_line_has_the_daemon_s_numbers(conversation, daemon):
    row = {"client": "x", "api": "/api/chat", "model": "tiny", "lane": "default", "state": "decode"}
    daemon.answers["/localrun/v1/requests/req_7"] = {"id": "req_7", "tokens_per_s": 81.5, "output_tokens": 43} | row
    daemon.hold = True
    conversation.say("one")
    conversation.wait_for("81.5 tokens/s, 43 tokens, first after")
    conversation.interrupt_while(lambda: not daemon.left.is_set())


def test_ctrl_c_stops_the_answer_and_not_the_conversation(conversation, daemon):
    daemon.hold = True
    conversation.say("one")
    conversation.wait_for("there.")
    conversation.interrupt_while(lambda: not daemon.left.is_set())
    daemon.hold = False
    conversation.say("two")
    conversation.wait_for("5 tokens")
    conversation.wait_for(">>> ")
    conversation.interrupt_until("quits)")
    conversation.wait_for(">>> ")
    conversation.type("\x04")
    assert conversation.process.wait(TIMEOUT_S) == 0
    assert [message["content"] for message in daemon.chats[1]["messages"]] == ["one", "Hello there.", "two"]


def test_commands(conversation, daemon):
    conversation.say("/set system Be brief.")
    conversation.wait_for("system message is set")
    conversation.say("/set parameter temperature 0.5")
    conversation.wait_for("temperature is 0.5")
    conversation.say("/set parameter warmth 1")
    conversation.wait_for("unknown option 'warmth'")
    conversation.say("/set parameter temprature 1")
    conversation.wait_for("did you mean 'temperature'?")
    conversation.say("/set parameter stop a b")
    conversation.wait_for("stop is ['a', 'b']")
    conversation.say('/set parameter stop "one two" \\n')
    conversation.wait_for("stop is ['one two', '\\\\n']")
    conversation.say("/lod other")
    conversation.wait_for("unknown command /lod; did you mean '/load'?")
    conversation.say("/show info")
    conversation.wait_for("context length      4096")
    conversation.say("/show parameters")
    conversation.wait_for("temperature         0.5")
    conversation.say("/show template")
    assert "\x1b[31m" not in conversation.wait_for("␛[31m")
    conversation.say("/show system")
    conversation.wait_for("Be brief.")
    conversation.say("/jump")
    conversation.wait_for("unknown command /jump")
    conversation.say("/?")
    conversation.wait_for("/set parameter NAME VALUE")
    conversation.say("/set verbose")
    conversation.say("one")
    conversation.wait_for("eval rate:            50.00 tokens/s")
    conversation.say("/clear")
    conversation.wait_for("cleared")
    conversation.say("/set quiet")
    conversation.say("two")
    quiet = conversation.wait_for(">>> ")
    assert "tokens" not in quiet
    assert "\x1b[1;23r" not in quiet
    body = [body for path, body in daemon.bodies if path == "/api/chat"][-1]
    assert body["options"] == {"temperature": 0.5, "stop": ["one two", "\\n"]}
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two"}]


def test_what_is_set_for_the_next_answers_and_taken_back(conversation, daemon):
    for command in ("/set format json", "/set think low", "/set nowordwrap"):
        conversation.say(command)
    daemon.words = ["word " * 40]
    conversation.say("one")
    assert "word " * 40 in conversation.wait_for("5 tokens")
    for command in ("/set noformat", "/set nothink", "/set wordwrap"):
        conversation.say(command)
    conversation.say("two")
    assert f"{'word ' * 15}word\r\nword" in conversation.wait_for("5 tokens")
    first, second = daemon.chats
    assert (first["format"], first["think"]) == ("json", "low")
    assert ("format" in second, second["think"]) == (False, False)
    conversation.say("/set format nowhere.json")
    conversation.wait_for("use json, a JSON schema or a file with one; 'nowhere.json'")
    conversation.say("/set loud")
    conversation.wait_for("write /set parameter NAME VALUE, /set system TEXT")


def test_save_makes_a_model_of_the_conversation_and_load_goes_on_with_it(conversation, daemon):
    daemon.shown = daemon.shown | {"messages": [{"role": "user", "content": "before"}]}
    for command in ("/set system Be brief.", "/set parameter temperature 0.5", "one"):
        conversation.say(command)
    conversation.wait_for("5 tokens")
    conversation.say("/save mine")
    conversation.wait_for("created the model mine; /load mine goes on with it")
    (body,) = [body for path, body in daemon.bodies if path == "/api/create"]
    said = [("user", "before"), ("user", "one"), ("assistant", "Hello there.")]
    assert body == {
        "model": "mine",
        "from": "tiny",
        "parameters": {"temperature": 0.5},
        "system": "Be brief.",
        "messages": [{"role": role, "content": content} for role, content in said],
    }
    conversation.say("/load mine")
    conversation.wait_for("mine answers from now on; the conversation was cleared")
    conversation.say("two")
    conversation.wait_for("5 tokens")
    assert (daemon.chats[-1]["model"], daemon.chats[-1]["messages"][1:]) == ("mine", [TWO])
    conversation.say("/load missing")
    conversation.wait_for("model 'missing' not found")
    conversation.say("/save")
    conversation.wait_for("write /save NAME")


def test_two_conversations_keep_the_lines_of_both(environment, daemon):
    pytest.importorskip("readline")
    both = [Conversation(environment, daemon.port) for _ in range(2)]
    try:
        for number, conversation in enumerate(both):
            conversation.wait_for("/bye quits")
            conversation.say(f"line {number}")
            conversation.wait_for("5 tokens")
        for conversation in both:
            conversation.say("/quit")
            assert conversation.process.wait(TIMEOUT_S) == 0
    finally:
        for conversation in both:
            conversation.close()
    lines = (Path(environment["LOCALRUN_HOME"]) / "state" / "history").read_text()
    assert re.findall(r"line(?: |\\040)(.)", lines) == ["0", "1"]


def test_a_message_of_several_lines_is_one_entry_in_the_next_conversation(environment, daemon):
    pytest.importorskip("readline")
    for keys, message in (("\x1b[200~one\n\ntwo\x1b[201~", "one\n\ntwo"), ("\x1b[A\x1b[A three", "one\n\ntwo three")):
        conversation = Conversation(environment, daemon.port)
        try:
            assert sent_by(conversation, daemon, keys, "\n") == message
            conversation.say("/bye")
            assert conversation.process.wait(TIMEOUT_S) == 0
        finally:
            conversation.close()


def test_lines_are_not_kept_after_nohistory(conversation, environment):
    pytest.importorskip("readline")
    for line in ("remember", "/set nohistory", "forget"):
        conversation.say(line)
    conversation.say("/bye")
    assert conversation.process.wait(TIMEOUT_S) == 0
    lines = (Path(environment["LOCALRUN_HOME"]) / "state" / "history").read_text()
    assert "remember" in lines
    assert "forget" not in lines


def sent_by(conversation, daemon, *keys: str) -> str:
    """The message that these keys make of what is in the prompt."""
    conversation.wait_for(">>> ")
    n_before = len(daemon.chats)
    for each in keys:
        conversation.type(each)
        if each.endswith("\n") and each is not keys[-1]:
            conversation.wait_for("... ")
    conversation.wait_for("5 tokens")
    assert len(daemon.chats) == n_before + 1
    return daemon.chats[-1]["messages"][-1]["content"]


def test_a_paste_of_several_lines_is_one_message(conversation, daemon):
    pytest.importorskip("readline")
    pasted = "    def f():\n\t/bye\n\n  <b>last</b>"
    assert sent_by(conversation, daemon, f"\x1b[200~{pasted}\x1b[201~", "\n") == pasted
    for crlf in ("def f():\r\n    return 1\r\n\r\nf()", "def f():\r\n    return 1\r\nf()", "a = [\r\n1\r\n]"):
        assert sent_by(conversation, daemon, f"\x1b[200~{crlf}\x1b[201~", "\n") == crlf.replace("\r", "")
    paragraphs = "one\n\ntwo\n\nthree"
    assert sent_by(conversation, daemon, f"\x1b[200~{paragraphs}\x1b[201~", "\n") == paragraphs
    pasted = '"""Docs."""\nimport x'
    assert sent_by(conversation, daemon, f"\x1b[200~{pasted}\x1b[201~", "\n") == pasted


def test_late_reports_of_a_terminal_and_lost_ends_of_pastes_are_no_text(conversation, daemon):
    pytest.importorskip("readline")
    assert sent_by(conversation, daemon, "a \x1b[201~\x1b[?61;6;7;22;52cc\x1b[Db ", "\n") == "a b c"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (['"""one"""\n'], "one"),
        (['"""one""" more\n'], '"""one""" more'),
        (['a """b""" c\n'], 'a """b""" c'),
        (['"""def f():\n', '    """Docs."""\n', "    return 1\n", '"""\n'], 'def f():\n    """Docs."""\n    return 1'),
        (['"""\n', "    def f():\n", '        """Docs\n', '        """\n', '"""\n'],
         '    def f():\n        """Docs\n        """'),
        (['"""\n', "/bye\n", 'end"""\n'], "/bye\nend"),
        (['""""""\n', "next\n"], "next"),
    ],
)  # fmt: skip
def test_triple_quotes(conversation, daemon, keys, message):
    if keys[0] == '""""""\n':
        conversation.say(keys.pop(0).strip())
    assert sent_by(conversation, daemon, *keys) == message


def test_what_is_typed_during_an_answer_is_not_shown_in_it(conversation, daemon):
    daemon.hold = True
    conversation.say("one")
    conversation.wait_for("there.")
    conversation.type("two\n")
    conversation.interrupt_while(lambda: not daemon.left.is_set())
    assert "two" not in conversation.seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_gives_the_last_row_back_and_keeps_the_lines(conversation, daemon, environment, number):
    daemon.hold = True
    conversation.say("remember")
    conversation.wait_for("first after")
    conversation.process.send_signal(number)
    conversation.wait_for("\x1b[r")
    assert conversation.process.wait(TIMEOUT_S) == 128 + number
    assert "remember" in (Path(environment["LOCALRUN_HOME"]) / "state" / "history").read_text()


def test_ctrl_z_gives_the_last_row_back_and_the_answer_goes_on(conversation, daemon):
    """The first process of a terminal, as here, is never stopped."""
    daemon.hold = True
    conversation.say("one")
    conversation.wait_for("first after")
    conversation.process.send_signal(signal.SIGTSTP)
    conversation.wait_for("\x1b[r")
    conversation.interrupt_while(lambda: not daemon.left.is_set())
    conversation.wait_for(">>> ")


def test_an_answer_in_the_background_is_not_stopped(environment, daemon):
    conversation = Conversation(environment, daemon.port, "tiny", "Hi", program=_IN_THE_BACKGROUND)
    try:
        assert "\x1b[1;23r" not in conversation.wait_for("Hello there.")
        assert conversation.process.wait(TIMEOUT_S) == 0
    finally:
        conversation.close()


def test_after_ctrl_z_the_line_is_there_again_and_can_be_edited(conversation, daemon):
    pytest.importorskip("readline")
    conversation.wait_for(">>> ")
    conversation.type("haf")
    conversation.wait_for("haf")
    conversation.process.send_signal(signal.SIGSTOP)
    os.waitpid(conversation.process.pid, os.WUNTRACED)
    conversation.set_line_mode()
    conversation.signal_until(">>> haf", lambda: conversation.process.send_signal(signal.SIGCONT))
    conversation.type("\x1b[Dl\n")
    conversation.wait_for(">>> ")
    assert daemon.chats[-1]["messages"][-1]["content"] == "half"


def test_alt_and_enter_begin_a_line(conversation, daemon):
    pytest.importorskip("readline")
    assert sent_by(conversation, daemon, "one\x1b\rtwo\x01a ", "\n") == "a one\ntwo"


@pytest.mark.parametrize("kind", ["dumb", ""])
def test_a_terminal_without_sequences_gets_none(environment, daemon, kind):
    conversation = Conversation(environment, daemon.port, kind=kind)
    try:
        conversation.say("one")
        assert "\x1b" not in conversation.wait_for("5 tokens")
    finally:
        conversation.close()


def test_line_ends_of_windows_and_what_reorders_text(conversation, daemon):
    daemon.words = ["first\r", "\nsecond \u202egnp.exe\u2066"]
    conversation.say("one")
    assert "first\r\nsecond \ufffdgnp.exe\ufffd" in conversation.wait_for("5 tokens")


def test_help_in_a_narrow_terminal_has_whole_words(environment, daemon):
    conversation = Conversation(environment, daemon.port, n_columns=60)
    try:
        conversation.say("/?")
        shown = conversation.wait_for("with it.")
        assert max(map(len, shown.splitlines())) < 60
        line = "/set parameter NAME VALUE   set an option, such as"
        assert f"{line}\r\n{'':28}temperature or num_predict;" in shown
    finally:
        conversation.close()


def test_the_line_of_numbers_wraps_at_words(environment, daemon):
    conversation = Conversation(environment, daemon.port, n_columns=30)
    try:
        conversation.say("one")
        conversation.wait_for("50.00 tokens/s, 5 tokens,\r\nfirst after")
    finally:
        conversation.close()


def test_several_lines_in_triple_quotes(conversation, daemon):
    conversation.say('"""first')
    conversation.wait_for("... ")
    conversation.type('second"""\n')
    conversation.wait_for("5 tokens")
    assert daemon.chats[0]["messages"][0]["content"] == "first\nsecond"


def test_a_refused_turn_is_shown_and_forgotten_and_the_conversation_goes_on(conversation, daemon):
    daemon.refusal = (429, {"error": "the queue is full"}, {"X-Localrun-Error": "queue_full"})
    conversation.say("one")
    conversation.wait_for("the queue is full")
    daemon.refusal = None
    conversation.say("two")
    conversation.wait_for("5 tokens")
    assert daemon.chats[1]["messages"] == [{"role": "user", "content": "two"}]


def test_a_daemon_that_goes_away_is_started_again_and_the_conversation_kept(conversation, daemon, localrun):
    conversation.say("one")
    conversation.wait_for("5 tokens")
    conversation.wait_for(">>> ")
    daemon.leave()
    conversation.type("two\n")
    conversation.wait_for("error:")
    conversation.wait_for("conversation is kept")
    assert localrun("ps", port=daemon.port).returncode == 0
    conversation.say("/bye")
    assert conversation.process.wait(TIMEOUT_S) == 0
    assert localrun("stop", "--daemon", port=daemon.port).returncode == 0


def test_a_model_that_does_not_exist_is_said_before_the_first_message(environment, daemon):
    conversation = Conversation(environment, daemon.port, model="missing")
    try:
        conversation.wait_for("model 'missing' not found")
        assert conversation.process.wait(TIMEOUT_S) == exits.MODEL_NOT_FOUND
    finally:
        conversation.close()


def test_control_characters_never_reach_the_terminal(conversation, daemon):
    daemon.words = ["\x1b]0;title\x07"]
    conversation.say("one")
    answer = conversation.wait_for("5 tokens")
    assert "␛]0;title␇" in answer
    assert "\x1b]0;" not in answer


def test_lines_are_remembered_for_the_user_alone(conversation, environment):
    conversation.say("remember me")
    conversation.wait_for("5 tokens")
    conversation.say("/bye")
    assert conversation.process.wait(TIMEOUT_S) == 0
    pytest.importorskip("readline")
    history = Path(environment["LOCALRUN_HOME"]) / "state" / "history"
    assert re.search("remember( |\\\\040)me", history.read_text())
    assert history.stat().st_mode & 0o077 == 0


ONE, TWO = ({"role": "user", "content": text} for text in ("one", "two"))


def test_the_whole_conversation_is_sent():
    session = Session(model="tiny", system="Be brief.")
    session.remember(ONE, "first")
    assert session.messages(TWO) == [
        {"role": "system", "content": "Be brief."},
        ONE,
        {"role": "assistant", "content": "first"},
        TWO,
    ]


def test_a_turn_without_an_answer_is_forgotten_and_clear_keeps_the_system_message():
    session = Session(model="tiny", system="S")
    session.remember(ONE, "")
    assert len(session.messages(TWO)) == 2
    session.remember(ONE, "stopped half")
    session.clear()
    assert session.messages(TWO) == [{"role": "system", "content": "S"}, TWO]


def test_set():
    session = Session(model="tiny")
    assert "0.25" in session.set("parameter temperature 0.25")
    session.set("parameter stop ###")
    session.set("system You are a pirate.")
    session.set("verbose")
    assert session.options == {"temperature": 0.25, "stop": ["###"]}
    assert session.system == "You are a pirate."
    assert session.stats is Stats.VERBOSE


@pytest.mark.parametrize(
    "arguments", ["", "loud", "system", "parameter", "parameter seed", "parameter warmth 1", "parameter seed x"]
)
def test_what_cannot_be_set_changes_nothing(arguments):
    session = Session(model="tiny")
    with pytest.raises(BadRequest):
        session.set(arguments)
    assert session == Session(model="tiny")


def test_values_get_the_types_that_the_api_takes():
    options = parse_options(["temperature=0", "top_k=40", "stop=a=b", "stop= c"])
    assert options == {"temperature": 0.0, "top_k": 40, "stop": ["a=b", " c"]}
    assert isinstance(options["temperature"], float)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [("temperature", "NAME=VALUE"), ("warmth=1", "the options are temperature"), ("top_k=1.5", "whole number")],
)
def test_wrong_ones_are_explained(assignment, words):
    with pytest.raises(BadRequest, match=words):
        parse_options([assignment])


def test_a_dropped_picture_is_sent_with_its_message_and_again_with_the_next(conversation, daemon, tmp_path: Path):
    daemon.shown = daemon.shown | {"capabilities": ["completion", "vision"]}
    path = tmp_path / "a fox.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\npicture")
    conversation.say(f"{tmp_path}/a\\ fox.png what is this?")
    conversation.wait_for("5 tokens")
    conversation.say("and now?")
    conversation.wait_for("5 tokens")
    conversation.say(f"{tmp_path}/none.txt is a text")
    conversation.wait_for("5 tokens")
    image = base64.b64encode(path.read_bytes()).decode()
    assert [message for message in daemon.chats[-1]["messages"] if message["role"] == "user"] == [
        {"role": "user", "content": "a fox.png what is this?", "images": [image]},
        {"role": "user", "content": "and now?"},
        {"role": "user", "content": f"{tmp_path}/none.txt is a text"},
    ]


def test_the_oldest_media_are_left_out_when_a_request_cannot_carry_all():
    session = Session(model="m")
    for number in range(20):
        session.remember({"role": "user", "content": str(number), "images": ["aGk="]}, "answer")
    assert session.leave_out({"role": "user", "content": "next", "images": ["aGk=", "aGk="]}) == 6
    assert [len(message["images"]) for message in session.history[::2]] == [0] * 6 + [1] * 14
    assert session.leave_out({"role": "user", "content": "text"}) == 0
